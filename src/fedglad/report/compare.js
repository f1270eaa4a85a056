// Runs side by side: a line a configuration, and a band over its seeds.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, has, missing, plural, el, colour, stroke, table, tip } = report;
  const { METRICS, state } = report;
  const { show, within, vertical, dot, axis, titled, roundAxis, below, zooms, line } = report;

  const COLOURS = 6; // --c0 to --c5

  function look(index) {
    const { groups } = report.payload;
    if (groups[index].baseline) return { name: "soft", type: "dashed", dash: "6 4" };
    const at = groups.slice(0, index).filter((group) => !group.baseline).length;
    const solid = at < COLOURS;
    return { name: `c${at % COLOURS}`, type: solid ? "solid" : "dotted", dash: solid ? "" : "2 3" };
  }

  /** Of one configuration: its rounds, and the mean, least and most over its seeds in each. */
  function band(group) {
    const [, read] = METRICS[state.metric];
    const found = new Map();
    for (const index of group.runs) {
      const of = report.payload.runs[index];
      const values = read(of) ?? [];
      of.rounds.forEach((round, i) => {
        if (!missing(values[i])) found.set(round, [...(found.get(round) ?? []), values[i]]);
      });
    }
    return [...found].sort(([a], [b]) => a - b).map(([round, seen]) => {
      const mean = seen.reduce((a, b) => a + b, 0) / seen.length;
      return { round, mean, least: Math.min(...seen), most: Math.max(...seen), seeds: seen.length };
    });
  }

  function bandSeries(points, name) {
    const data = points.map(({ round, least, most }) => [round, least, most]);
    const edge = (api) => {
      const [low, high] = [1, 2].map((end) => data.map((point) => api.coord([point[0], point[end]])));
      return [...low, ...high.reverse()];
    };
    const style = { fill: colour(name), opacity: 0.18 };
    return {
      type: "custom", name: "band", data, clip: true, silent: true, z: 1, encode: { x: 0, y: [1, 2] },
      renderItem: (params, api) => (params.dataIndex ? null : { type: "polygon", shape: { points: edge(api) }, style }),
    };
  }

  function shownGroups() {
    const all = report.payload.groups.map((group, index) => ({ ...group, index, points: band(group) }));
    return all.filter(({ index }) => !state.hidden.has(index));
  }

  function compareOption(box) {
    const shown = shownGroups();
    box.shown = shown;
    box.rounds = [...new Set(report.payload.runs.flatMap((of) => of.rounds))].sort((a, b) => a - b);
    const [left, right] = [52, 18];
    const option = { series: [], dataZoom: zooms(box.rounds.length, [0], left, right) };
    option.grid = { left, right, top: 38, bottom: below(box.rounds.length), outerBoundsMode: "none" };
    box.grid = option.grid;
    option.xAxis = roundAxis(box.rounds);
    const [, , , isScore] = METRICS[state.metric];
    const unit = isScore && report.payload.score.share ? ", %" : "";
    option.yAxis = axis({ scale: true, ...titled(METRICS[state.metric][0] + unit, left) });
    for (const { index, label, points } of shown) {
      const { name, type } = look(index);
      if (points.some(({ seeds }) => seeds > 1)) option.series.push(bandSeries(points, name));
      const style = { lineStyle: { color: colour(name), type } };
      option.series.push(line(points.map((point) => point.mean), points.map((point) => point.round), label, style));
    }
    return option;
  }

  function drawCompare() {
    const { groups, runs } = report.payload;
    const several = runs.length > 1;
    $("compare-section").hidden = !several;
    if (!several) return;
    for (const name of ["averaged", "validation"]) {
      $("metric").querySelector(`[value=${name}]`).parentElement.hidden = !runs.some((of) => has(of[name]));
    }
    const some = groups.some((group) => band(group).length);
    show("compare", some ? "" : `No run recorded ${METRICS[state.metric][0].toLowerCase()}.`, compareOption);
    const rows = groups.map((group, index) => {
      const { name, dash } = look(index);
      const seeds = group.runs.length > 1 ? ` (${plural(group.runs.length, "seed")})` : "";
      const shown = String(!state.hidden.has(index));
      const attributes = { type: "button", class: "quiet", "aria-pressed": shown };
      const toggle = el("button", attributes, stroke(name, dash), group.label + seeds);
      toggle.addEventListener("click", () => {
        if (!state.hidden.delete(index)) state.hidden.add(index);
        drawCompare();
        report.showCursors();
        $("legend").querySelectorAll("button")[index].focus();
      });
      return el("li", {}, toggle);
    });
    $("legend").replaceChildren(...rows);
  }

  function compareCursor(chart) {
    const { grid, shown } = $("compare");
    const x = chart.convertToPixel({ xAxisIndex: 0 }, state.round);
    if (!within(chart, grid, x)) return [];
    const dots = shown.flatMap(({ index, points }) => {
      const point = points.find(({ round }) => round === state.round);
      return point ? [dot(x, chart.convertToPixel({ yAxisIndex: 0 }, point.mean), look(index).name)] : [];
    });
    return [vertical(x, grid.top, chart.getHeight() - grid.bottom), ...dots];
  }

  function compareTip(event, round) {
    const told = METRICS[state.metric][2];
    const rows = $("compare").shown.map(({ label, points }) => {
      const point = points.find((one) => one.round === round);
      const spread = point && point.seeds > 1 ? `${told(point.least)} to ${told(point.most)}` : "";
      return [label, told(point?.mean), spread];
    });
    tip(event, `Round ${round}`, rows);
  }

  /** The table of results: a row a configuration, in the colour of its line, block by block. */
  function drawResults() {
    const made = report.payload.table;
    $("results").hidden = !made;
    if (!made) return;
    const row = ({ label, cells, tone, group, averaged }) => {
      const { name, dash } = look(group);
      const line = averaged ? el("span", { class: "no-line" }) : stroke(name, dash);
      const called = el("div", { class: "row" }, line, el("bdi", {}, label));
      const head = el("th", { scope: "row", class: "text" }, called);
      const texts = cells.map((text, at) => el("td", { class: made.columns[at] }, text));
      return el("tr", { class: tone }, head, ...texts);
    };
    const wide = made.heads.length + 1;
    const rows = made.blocks.flatMap(({ label, rows: its }) => [
      ...(label ? [el("tr", { class: "block" }, el("th", { scope: "rowgroup", colspan: wide }, label))] : []),
      ...its.map(row),
    ]);
    const drawn = table(["", ...made.heads], rows, [0]);
    const name = { class: "scroll", tabindex: "0", role: "region", "aria-label": "Results" };
    const remarks = made.remarks.map((text) => el("p", { class: "after" }, text));
    const parts = made.details.flatMap(({ title, lines }) => [
      el("h4", {}, title), el("ul", {}, ...lines.map((text) => el("li", {}, text))),
    ]);
    const open = $("results").querySelector("details")?.open; // a live page stays as it was opened
    const details = el("details", open ? { open: "" } : {}, el("summary", {}, "Seed by seed"), ...parts);
    $("results").replaceChildren(el("div", name, drawn), ...remarks, ...(parts.length ? [details] : []));
  }

  Object.assign(report, { drawCompare, drawResults, compareCursor, compareTip, bandSeries });
})();
