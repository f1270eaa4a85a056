// The page: the chosen round, the pointer and the keyboard, the live data, the start.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, el, set, tip } = report;
  const { METRICS, HEATS, state, run, place, kind, distrusted, opening } = report;
  const { CHARTS, chart, overlay } = report;
  const { drawRounds, roundsCursor, figures, roundTip } = report;
  const { drawCompare, compareCursor, compareTip } = report;
  const { drawOwn, ownCursor } = report;
  const { drawHeat, heatCursor, heatTip } = report;
  const { drawFit, fitCursor, nearest, drawLabels, labelsTip } = report;
  const { showPanel, drawTable, markRow, showWords, showRunChoice, showSettings } = report;
  const { drawClients } = report;

  // ---- The chosen round

  function choose(round) {
    state.followed = Boolean(report.payload.live) && round === run().rounds.at(-1);
    if (round === state.round) return;
    state.round = round;
    showRound();
  }

  function step(by) {
    const { rounds } = run();
    const from = place();
    const to = from < 0 ? rounds.length - 1 : Math.min(Math.max(from + by, 0), rounds.length - 1);
    if (rounds.length) choose(rounds[to]);
  }

  function nextAlarm() {
    const bad = distrusted(run());
    const from = place();
    if (bad.length) choose(run().rounds[bad.find((i) => i > from) ?? bad[0]]);
  }

  function pressed(event) {
    const { rounds } = run();
    const moves = {
      ArrowLeft: () => step(event.shiftKey ? -10 : -1),
      ArrowRight: () => step(event.shiftKey ? 10 : 1),
      Home: () => choose(rounds[0] ?? null),
      End: () => choose(rounds.at(-1) ?? null),
      Escape: () => choose(null),
    };
    if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    tip(null);
    moves[event.key]();
  }

  // ---- The pointer

  function closest(rounds, x) {
    return rounds.reduce((best, round) => (Math.abs(round - x) < Math.abs(best - x) ? round : best), rounds[0]);
  }

  function pointed(id, made, event) {
    const x = made.convertFromPixel({ xAxisIndex: 0 }, event.offsetX);
    const { rounds } = run();
    const inside = event.offsetX > 40 && event.offsetX < made.getWidth() - 8 && event.offsetY < made.getHeight() - 34;
    if (id === "labels") return inside ? labelsTip(event, made) : tip(null);
    const i = id === "fit" ? nearest(made, event) : id === "heat" ? x : rounds.indexOf(closest(rounds, x));
    if (!inside || !(i in rounds) || (id === "heat" && event.offsetX < $("heat").grid.left)) return tip(null);
    const round = id === "compare" ? closest($("compare").rounds, x) : rounds[i];
    choose(round);
    if (id === "compare") return compareTip(event, round);
    return id === "heat" ? heatTip(event, i, made) : roundTip(event, i);
  }

  function listen(id, made) {
    const box = $(id);
    const seen = (event) => pointed(id, made, { box, offsetX: event.offsetX, offsetY: event.offsetY });
    made.getZr().on("mousemove", seen);
    made.getZr().on("click", seen);
    made.getZr().on("globalout", () => tip(null));
    made.on("datazoom", showCursors);
  }

  // ---- The whole page

  function showCursors() {
    const i = place();
    const makers = { rounds: roundsCursor, heat: heatCursor, fit: fitCursor, compare: compareCursor, own: ownCursor };
    for (const [id, make] of Object.entries(makers)) {
      const made = chart(id);
      if (made) overlay(made, i < 0 && (id !== "compare" || state.round === null) ? [] : make(made, i));
    }
  }

  function showRound() {
    const of = run();
    const i = place();
    const told = () => [kind(of, i), ...figures(of, i).map(([name, value]) => `${name} ${value}`)].join(", ");
    const said = i < 0 ? "no round chosen" : `round ${of.rounds[i]}: ${told()}`;
    const values = {
      "aria-valuemin": of.rounds[0] ?? 0,
      "aria-valuemax": of.rounds.at(-1) ?? 0,
      "aria-valuenow": of.rounds[Math.max(i, 0)] ?? 0,
      "aria-valuetext": said,
    };
    drawLabels();
    for (const id of CHARTS) if (chart(id)) set($(id), values);
    $("where").textContent = i < 0 ? "No round" : `Round ${of.rounds[i]} of ${of.rounds_planned ?? of.rounds.at(-1)}`;
    $("previous").disabled = i === 0 || !of.rounds.length;
    $("next").disabled = i === of.rounds.length - 1;
    $("next-alarm").disabled = !distrusted(of).length;
    showPanel(i);
    markRow();
    showCursors();
  }

  function draw() {
    if (!run()) return;
    drawRounds();
    drawHeat();
    drawFit();
    drawCompare();
    drawOwn();
    showRound();
  }

  function showAll() {
    showWords();
    const any = Boolean(run());
    for (const part of document.querySelectorAll("main > section:not(.opening), .bar, .pair")) part.hidden = !any;
    if (!any) return;
    if (state.followed) state.round = opening();
    showRunChoice();
    showSettings();
    draw();
    drawTable();
    drawClients();
  }

  function pick(index) {
    state.run = index;
    state.followed ||= !run().rounds.includes(state.round);
    showAll();
  }

  // ---- Choices

  function radios(id, choices, key, redraw) {
    for (const [value, [text]] of Object.entries(choices)) {
      const input = el("input", { type: "radio", name: id, value });
      input.checked = state[key] === value;
      input.addEventListener("change", () => {
        state[key] = value;
        redraw();
        showCursors();
      });
      $(id).append(el("label", {}, input, text));
    }
  }

  // A page opened from a file may be refused the store: then the choice lasts as long as the page.
  const kept = (to) => { try { return to ? (localStorage.fedglad = to) : localStorage.fedglad; } catch { return to; } };

  function setTheme(theme, drawn = true) {
    document.documentElement.dataset.theme = theme;
    const other = theme === "dark" ? "light" : "dark";
    $("theme").textContent = other === "dark" ? "Dark" : "Light";
    set($("theme"), { "aria-label": `Switch to the ${other} theme` });
    if (drawn) draw();
  }

  // ---- Live

  function say(text, name = "") {
    $("state").className = `state ${name}`;
    if ($("state").textContent !== text) $("state").textContent = text;
  }

  function sayState() {
    const { live, runs } = report.payload;
    const going = runs.filter((of) => !of.finished);
    const last = (of) => of.rounds.at(-1) ?? 0;
    const all = runs.length;
    const far = () => `round ${last(going[0])} of ${going[0].rounds_planned ?? "?"}`;
    if (!all) return say(live ? "Live: waiting for the first round" : "", "live");
    if (!going.length) return say(all > 1 ? "All runs are finished" : "The run is finished");
    if (live) return say(`Live: ${going.length === 1 ? far() : `${going.length} runs go on`}`, "live");
    return say(all === 1 ? `Not finished: ${far()}` : `${going.length} of ${all} runs are not finished`);
  }

  function update(fresh) {
    const { name } = run() ?? {};
    report.payload = fresh;
    state.run = Math.max(0, fresh.runs.findIndex((of) => of.name === name));
    showAll();
  }

  async function poll() {
    const wait = 1000 * report.payload.live.seconds;
    let fresh = null;
    try {
      const headers = poll.version ? { "If-None-Match": poll.version } : {};
      const answer = await fetch("data.json", { cache: "no-store", headers });
      if (answer.status !== 304) {
        if (!answer.ok) throw new Error(`status ${answer.status}`);
        fresh = await answer.json();
        poll.version = answer.headers.get("ETag");
      }
    } catch {
      say("The server does not answer: this is the last state that it told. Trying again.", "gone");
      setTimeout(poll, Math.max(wait, 5000));
      return;
    }
    // The summary comes after the last round, and may take its time: until then there may be news.
    const { runs } = report.payload;
    if (fresh || !runs.length || runs.some((of) => !of.summed)) setTimeout(poll, wait);
    if (fresh) update(fresh);
    sayState();
  }

  // ---- Start

  function watchSize() {
    const widths = new Map();
    const observer = new ResizeObserver((entries) => {
      const changed = entries.filter(({ target, contentRect }) => widths.get(target) !== contentRect.width);
      for (const { target, contentRect } of changed) widths.set(target, contentRect.width);
      if (changed.length) requestAnimationFrame(draw);
    });
    for (const id of CHARTS) {
      widths.set($(id), $(id).clientWidth);
      observer.observe($(id));
    }
  }

  /** Paper is light and as wide as a page: the charts are drawn anew for it. */
  function printing() {
    const root = document.documentElement;
    let theme = "light";
    window.addEventListener("beforeprint", () => {
      theme = root.dataset.theme;
      root.classList.add("printing");
      setTheme("light");
      for (const id of CHARTS) chart(id)?.getZr().flush(); // no frame comes before the print
    });
    window.addEventListener("afterprint", () => {
      root.classList.remove("printing");
      setTheme(theme);
    });
  }

  function start() {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const systems = () => (dark.matches ? "dark" : "light");
    const other = () => (document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    setTheme(kept() ?? systems(), false);
    dark.addEventListener("change", () => setTheme(systems()));
    $("theme").addEventListener("click", () => setTheme(kept(other())));
    radios("metric", METRICS, "metric", drawCompare);
    radios("heat-kind", HEATS, "heat", drawHeat);
    $("filter").addEventListener("input", () => {
      state.filter = $("filter").value;
      drawHeat();
      showCursors();
    });
    $("run").addEventListener("change", () => pick(Number($("run").value)));
    $("previous").addEventListener("click", () => step(-1));
    $("next").addEventListener("click", () => step(1));
    $("next-alarm").addEventListener("click", nextAlarm);
    $("table").addEventListener("toggle", drawTable);
    for (const id of CHARTS) $(id).addEventListener("keydown", pressed);
    showAll();
    sayState();
    watchSize();
    printing();
    const { live } = report.payload;
    if (live) setTimeout(poll, 1000 * live.seconds);
  }

  Object.assign(report, { listen, showCursors });
  start();
})();
