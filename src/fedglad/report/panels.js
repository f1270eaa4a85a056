// Text beside the charts: the headline, the chosen round, the tables, the settings.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, NOTHING, doubt, el, factor, flag, has, missing, named, number, percent, plural, table } = report;
  const { FLAGS, scored, state, run, place, kind, flagsOf } = report;
  const { figures, drawResults } = report;

  function words(of, i) {
    const what = kind(of, i);
    const reason = of.reason[i] ?? "no reason was recorded";
    if (what === "skipped") return `The round was skipped, the model stayed as it was: ${reason}.`;
    const mean = of.factor?.mean[i] ?? null;
    const how = mean < 0.995 ? "shortened" : "lengthened";
    const moved = mean === null ? "" : Math.abs(mean - 1) <= 0.005 ? " The step was left about as it was."
      : ` The step was ${how}: on average it has ${factor(mean)} times its length.`;
    if (what in FLAGS) return FLAGS[what].words + moved;
    if (of.gsi[i] === null) return `No GSI was recorded, so this round is not judged.${moved}`;
    if (of.usual[i] === null) return `There is too little history yet to judge this round by.${moved}`;
    return `GSI was near its usual value: nothing speaks against this round.${moved}`;
  }

  function member([id, share, loss, norm, rejected, trust, flags], judged) {
    const told = rejected?.startsWith("left out by ") ? rejected : `rejected: ${rejected}`;
    const why = rejected === null ? null : el("span", { class: "why" }, told);
    const marks = flagsOf(flags).map((name) => el("span", { class: "why" }, doubt(name)));
    const name = el("td", { class: "text" }, el("bdi", {}, String(id)), ...marks, why);
    const texts = [share === null ? NOTHING : percent(100 * share), number(loss), number(norm)];
    const cells = [...texts, ...(judged ? [factor(trust)] : [])].map((text) => el("td", {}, text));
    return el("tr", rejected === null ? {} : { class: "rejected" }, name, ...cells);
  }

  function factors(of, i) {
    const { least, mean, most } = of.factor ?? {};
    if (missing(mean?.[i])) return [];
    return [["Factor, mean", factor(mean[i]), `${factor(least[i])} to ${factor(most[i])}`]];
  }

  function showPanel(i) {
    const of = run();
    const panel = $("panel");
    panel.setAttribute("tabindex", "0");
    if (i < 0) {
      const hint = of.rounds.length ? "Point at a round, or focus a chart and press an arrow key."
        : "There is no round to show.";
      panel.replaceChildren(el("h3", { id: "panel-title" }, "No round chosen"), el("p", { class: "empty" }, hint));
      return;
    }
    const what = kind(of, i);
    const head = el("div", { class: "head" }, el("h3", { id: "panel-title" }, `Round ${of.rounds[i]}`), flag(what));
    const list = el("dl");
    for (const [name, value, small] of [...figures(of, i), ...factors(of, i)]) {
      list.append(el("dt", {}, name), el("dd", {}, small ? el("small", {}, `${small}  `) : null, value));
    }
    const judged = of.cohorts[i].some((one) => !missing(one[5]));
    const heads = ["Client", "Weight", "Loss", "Norm", ...(judged ? ["Trust"] : [])];
    const cohort = table(heads, of.cohorts[i].map((one) => member(one, judged)), [0]);
    const [size, listed] = [of.sizes[i], of.cohorts[i].length];
    const counts = [[of.rejections[i], "rejected"], [of.flagged[i], "flagged"], [listed < size && listed, "listed"]];
    const parts = counts.filter(([count]) => count).map(([count, what]) => `, ${count} ${what}`);
    const title = el("h4", {}, `Cohort: ${plural(size, "client")}${parts.join("")}`);
    panel.replaceChildren(head, el("p", { class: `words ${named(what)}` }, words(of, i)), list, title, cohort);
  }

  function drawTable() {
    if (!$("table").open) return;
    const of = run();
    const told = scored(of.score);
    const columns = [[of.score.title, of.scores], ["Averaged", of.averaged], ["Validation", of.validation]];
    const kept = columns.filter(([, values], k) => !k || has(values));
    const shares = kept.map(([name]) => name);
    const heads = ["Round", "Verdict", ...shares, "Test loss", "Training loss", "GSI", "Usual GSI", "Mean factor"];
    const rows = of.rounds.map((round, i) => {
      const numbers = [of.test_loss[i], of.train_loss[i], of.gsi[i], of.usual[i]].map(number);
      const counts = [of.sizes[i], of.rejections[i]].map(String);
      const verdict = el("td", { class: "text" }, flag(kind(of, i)));
      const parts = kept.map(([, values]) => told(values[i]));
      return [String(round), verdict, ...parts, ...numbers, factor(of.factor?.mean[i]), ...counts];
    });
    $("table").querySelector(".scroll").replaceChildren(table([...heads, "Clients", "Rejected"], rows, [1]));
    markRow();
  }

  function markRow() {
    const rows = $("table").querySelectorAll("tbody tr");
    rows.forEach((row, i) => row.classList.toggle("chosen", i === place()));
  }

  function tile({ label, value, detail, tone }) {
    const rows = [["label", label], ["value", value], ["detail", detail]].filter(([, text]) => text);
    const look = ["good", "bad"].includes(tone) ? tone : "plain";
    return el("li", { class: `tile ${look}` }, ...rows.map(([name, text]) => el("div", { class: name }, text)));
  }

  function showWords() {
    const { title, verdict, headline, table: results, notes, average } = report.payload;
    document.title = title;
    $("title").textContent = title;
    $("verdict").textContent = verdict;
    const { words, higher } = run()?.score ?? report.payload.score;
    $("good-score").textContent = `${words} ${higher ? "climbs" : "falls"}`;
    drawResults();
    $("tiles").replaceChildren(...headline.slice(results?.tiles ?? 0).map(tile));
    $("average").textContent = average ?? "";
    $("average").hidden = !average;
    $("notes").replaceChildren(el("ul", {}, ...notes.map((note) => el("li", {}, note))));
    $("notes").hidden = !notes.length;
  }

  function showRunChoice() {
    const { runs, title } = report.payload;
    const several = runs.length > 1;
    $("run-label").hidden = !several;
    $("run-name").hidden = several || run().name === title;
    $("run-name").textContent = run().name;
    const called = ({ name, label, seed }) => [...new Set([name, label, seed])].filter(Boolean).join(" · ");
    $("run").replaceChildren(...runs.map((of, i) => el("option", { value: i }, called(of))));
    $("run").value = state.run;
  }

  function showSettings() {
    const row = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)));
    const rows = Object.entries(run().config ?? {}).map(row);
    const none = ["This run’s folder has no readable config.toml."];
    $("settings").querySelector("dl").replaceChildren(...(rows.length ? rows : none));
  }

  Object.assign(report, { showPanel, drawTable, markRow, showWords, showRunChoice, showSettings });
})();
