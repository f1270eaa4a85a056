// The table of clients: the worst first, or by a column; a few of them, or all.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, NOTHING, doubt, el, factor, missing, number, percent, plural, svg, table } = report;
  const { DOUBTS, NO_ROUND, scored, state, run } = report;

  const FIRST = 50; // rows that are shown until all are asked for
  const [WIDE, HIGH] = [84, 20]; // of a line of scores

  /** A client's trust over its rounds, with a mark where it ends and a thin line at 0.5. */
  function spark(scores, rounds, last) {
    const values = [...scores].map((digit) => parseInt(digit, 36) / 35);
    const x = (i) => (values.length > 1 ? 3 + ((WIDE - 6) * i) / (values.length - 1) : WIDE - 3);
    const y = (value) => HIGH - 3 - (HIGH - 6) * value;
    const points = values.map((value, i) => `${x(i).toFixed(1)} ${y(value).toFixed(1)}`);
    const about = `Trust over ${plural(rounds, "round")}, at last`; // the number follows
    return svg("svg", { class: "spark", width: WIDE, height: HIGH, role: "img", "aria-label": about },
      svg("path", { class: "half", d: `M0 ${HIGH / 2}H${WIDE}` }),
      svg("path", { class: "line", d: `M${points.join("L")}` }),
      svg("circle", { class: last < 0.5 ? "end low" : "end", cx: x(values.length - 1), cy: y(last), r: 2.5 }));
  }

  function trustCell(client, columns, k) {
    const scores = columns.scores[k];
    const [rounds, last] = [columns.judged[k], columns.trust[k]];
    return el("td", {}, scores ? spark(scores, rounds, last) : null, el("span", {}, factor(last)));
  }

  /** How often a client was flagged, and by what. */
  function flaggedCell(client, { flagged, judged, flags }, k) {
    const often = judged[k] ? `${flagged[k]} of ${judged[k]}` : NOTHING;
    const by = report.payload.flags.map((name, at) => [name, flags[k] ? flags[k][at] : 0]).filter(([, n]) => n);
    const marks = by.sort((a, b) => b[1] - a[1]).map(([name, n]) => {
      const mark = doubt(name);
      mark.title = DOUBTS[name] ?? "";
      return el("span", {}, mark, ` ${n}`);
    });
    const why = marks.length ? el("span", { class: "why" }, ...marks) : null;
    return el("td", { class: flagged[k] ? "text" : "text none" }, often, why);
  }

  function reasonCell(client) {
    const reason = client[4] ?? "";
    return el("td", { class: "text" }, el("span", { class: "brief", title: reason }, reason));
  }

  const count = (value) => el("td", value ? {} : { class: "none" }, String(value));

  // Head, what it is sorted by, its cell; whether the first click puts the largest on top.
  const COLUMNS = {
    client: { head: "Client", value: ([id]) => id, cell: ([id]) => el("td", { class: "text" }, el("bdi", {}, String(id))) },
    trust: { head: "Trust", value: (_, { trust }, k) => trust[k], cell: trustCell, about: "Over its rounds, and the last" },
    flagged: { head: "Flagged", value: (_, { flagged }, k) => flagged[k], cell: flaggedCell, down: true },
    mean: {
      head: "Mean trust", value: (_, { mean_trust: all }, k) => all[k], cell: (_, { mean_trust: all }, k) => factor(all[k]),
    },
    rounds: { head: "Rounds", value: ([, rounds]) => rounds, cell: ([, rounds]) => String(rounds), down: true },
    share: {
      head: "Share", value: (_, { share }, k) => share[k], down: true, about: "Its mean weight in the mean update",
      cell: (_, { share }, k) => (missing(share[k]) ? NOTHING : percent(100 * share[k])),
    },
    norm: {
      head: "Norm", value: (_, { ratio }, k) => ratio[k], cell: (_, { ratio }, k) => ratioText(ratio[k]), down: true,
      about: "Mean of its norm over the median of the round",
    },
    loss: { head: "Loss", value: (_, { loss }, k) => loss[k], cell: (_, { loss }, k) => number(loss[k]), down: true },
    own: {
      head: "Own score", value: (_, { own }, k) => own[k], cell: (_, { own }, k) => scored(run().score)(own[k]),
      about: "Of the model on its own held-out samples, when tested last",
    },
    clipped: {
      head: "Clipped", value: (_, { clipped }, k) => clipped[k], cell: (_, { clipped }, k) => count(clipped[k]), down: true,
    },
    out: {
      head: "Left out", value: (_, { left_out: out }, k) => out[k], cell: (_, { left_out: out }, k) => count(out[k]),
      down: true, about: "By a filter or weighting, by design",
    },
    rejected: { head: "Rejected", value: (client) => client[3], cell: (client) => count(client[3]), down: true },
    reason: { head: "Last reason", value: (client) => client[4], cell: reasonCell },
  };

  const ratioText = (x) => (x < 100 ? factor(x) : number(x));

  /** The columns that this run has something for. */
  function shown({ clients, client_columns: columns }) {
    const absent = new Set();
    if (!columns.trust) for (const name of ["trust", "flagged", "mean"]) absent.add(name);
    if (!columns.own) absent.add("own");
    if (!columns.clipped) absent.add("clipped");
    if (!columns.left_out) absent.add("out");
    if (!clients.some((client) => client[4] !== null)) absent.add("reason");
    return Object.keys(COLUMNS).filter((name) => !absent.has(name));
  }

  /** Places of the clients in the order that was chosen; what is not known comes last. */
  function order({ clients, client_columns: columns }) {
    const { by, down } = state.sort;
    if (by === null) return columns.worst;
    const texts = new Intl.Collator("en", { numeric: true });
    const values = clients.map((client, k) => COLUMNS[by].value(client, columns, k));
    const numeric = (a, b) => typeof a === "number" && typeof b === "number";
    const compare = (a, b) => (down ? -1 : 1) * (numeric(a, b) ? a - b : texts.compare(String(a), String(b)));
    return [...columns.worst].sort((i, j) => {
      const [a, b] = [values[i], values[j]];
      return missing(a) || missing(b) ? missing(a) - missing(b) : compare(a, b);
    });
  }

  function heads(names) {
    return names.map((name) => {
      const { head, about } = COLUMNS[name];
      const sort = el("button", { type: "button", "data-sort": name, ...(about ? { title: about } : {}) }, head);
      sort.addEventListener("click", () => sortBy(name));
      const now = state.sort.by === name ? { "aria-sort": state.sort.down ? "descending" : "ascending" } : {};
      return el("th", { scope: "col", ...now, ...(["client", "flagged", "reason"].includes(name) ? { class: "text" } : {}) }, sort);
    });
  }

  /** The first click sorts, the next one turns the order around, the third goes back to the worst first. */
  function sortBy(name) {
    const first = Boolean(COLUMNS[name].down);
    const { by, down } = state.sort;
    const again = by === name && down !== first;
    state.sort = by !== name ? { by: name, down: first } : { by: again ? null : name, down: again ? false : !first };
    $("clients").querySelector(".scroll").scrollTop = 0;
    drawClients();
  }

  function whyNone({ rounds, updates }) {
    if (!rounds.length) return `${NO_ROUND} No client is recorded yet.`;
    return updates ? "The clients of this run have no ids, so they cannot be told apart." : "No client is recorded yet.";
  }

  function notes({ clients, clients_left_out: left, client_columns: { trust } }, listed) {
    const all = clients.length + left;
    const sorted = state.sort.by === null ? "the worst first" : "";
    const told = [`${plural(all, "client")}${sorted && all > 1 ? `, ${sorted}` : ""}.`];
    if (left) told.push(`${plural(left, "client")} that have less against them are not in this page: see fedglad.analysis.clients.`);
    if (!trust) told.push("No trust was recorded, in an older run or because the server saw sums only, so its columns are left out.");
    const parts = [el("p", { class: "after" }, told.join(" "))];
    if (clients.length > FIRST) {
      const text = listed < clients.length ? `Show all ${plural(clients.length, "client")}` : `Show ${FIRST} only`;
      const more = el("button", { type: "button", id: "everybody", class: "quiet" }, text);
      more.addEventListener("click", () => {
        state.everybody = !state.everybody;
        drawClients();
      });
      parts.unshift(more);
    }
    return el("div", { class: "under" }, ...parts);
  }

  function drawClients() {
    const of = run();
    const { clients, client_columns: columns } = of;
    if (!clients.length) {
      $("clients").replaceChildren(el("div", { class: "chart empty" }, whyNone(of)));
      return;
    }
    const names = shown(of);
    if (!names.includes(state.sort.by)) state.sort = { by: null, down: false }; // another run had that column
    const places = order(of).slice(0, state.everybody ? clients.length : FIRST);
    const rows = places.map((k) => {
      const cells = names.map((name) => {
        const made = COLUMNS[name].cell(clients[k], columns, k);
        return made instanceof Node ? made : el("td", {}, made);
      });
      return el("tr", columns.look?.[k] ? { class: "look" } : {}, ...cells);
    });
    // What is drawn anew, by a click or by news, keeps the place that the reader had.
    const old = $("clients").querySelector(".scroll");
    const { scrollTop = 0, scrollLeft = 0 } = old ?? {};
    const { sort: held } = document.activeElement.dataset;
    const button = document.activeElement.id === "everybody";
    const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": "Clients" };
    const box = el("div", region, table(heads(names), rows, []));
    $("clients").replaceChildren(box, notes(of, places.length));
    Object.assign(box, { scrollTop, scrollLeft });
    if (held) box.querySelector(`[data-sort="${held}"]`)?.focus({ preventScroll: true });
    if (button) $("everybody")?.focus({ preventScroll: true });
  }

  Object.assign(report, { drawClients });
})();
