// The scores of single clients on their own samples: mean, worst tenth, and a band of ± std.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, colour, el, has, missing, stroke } = report;
  const { scoreTitle, run } = report;
  const { show, within, vertical, dot, axis, titled, roundAxis, below, zooms, line, bandSeries } = report;

  /** Name, rounds, values, colour, kind of stroke; those that the run has. */
  function lines({ own, averaged_own: averaged }) {
    const all = [
      ["mean", own?.rounds, own?.mean, "accent", "solid", ""],
      ["worst tenth", own?.rounds, own?.worst, "outlier", "solid", ""],
      ["mean of the averaged model", averaged?.rounds, averaged?.mean, "accent", [2, 3], "2 3"],
      ["worst tenth of the averaged model", averaged?.rounds, averaged?.worst, "outlier", [2, 3], "2 3"],
    ];
    return all.filter(([, , values]) => has(values));
  }

  function ownOption(box) {
    const of = run();
    const [left, right] = [52, 18];
    const option = { series: [], dataZoom: zooms(of.rounds.length, [0], left, right) };
    option.grid = { left, right, top: 38, bottom: below(of.rounds.length), outerBoundsMode: "none" };
    box.grid = option.grid;
    option.xAxis = roundAxis(of.rounds);
    option.yAxis = axis({ scale: true, ...titled(scoreTitle(of.score), left) });
    const points = (of.own?.rounds ?? []).map((round, i) => ({ round, least: of.own.low[i], most: of.own.high[i] }));
    const known = points.filter(({ least, most }) => !missing(least) && !missing(most));
    if (known.length) option.series.push(bandSeries(known, "accent"));
    for (const [name, rounds, values, shade, type] of lines(of)) {
      const few = rounds.length < 80; // most rounds lie between two tests
      option.series.push({ ...line(values, rounds, name, { lineStyle: { color: colour(shade), type } }), showSymbol: few });
    }
    return option;
  }

  function drawOwn() {
    const of = run();
    const tested = lines(of).length > 0;
    $("own-section").hidden = !tested;
    show("own", tested ? "" : "No single client was tested.", ownOption);
    const samples = lines(of).map(([name, , , shade, , dash]) => el("span", {}, stroke(shade, dash), ` ${name}`));
    const count = of.own?.count.at(-1);
    const band = missing(count) ? [] : [el("span", {}, `band: mean ± standard deviation between clients, ${count} at last`)];
    $("own-keys").replaceChildren(...samples, ...band);
  }

  function ownCursor(made, i) {
    const of = run();
    const { grid } = $("own");
    const x = made.convertToPixel({ xAxisIndex: 0 }, of.rounds[i]);
    if (!within(made, grid, x)) return [];
    const dots = lines(of).flatMap(([, rounds, values, shade]) => {
      const value = values[rounds.indexOf(of.rounds[i])];
      return missing(value) ? [] : [dot(x, made.convertToPixel({ yAxisIndex: 0 }, value), shade)];
    });
    return [vertical(x, grid.top, made.getHeight() - grid.bottom), ...dots];
  }

  Object.assign(report, { drawOwn, ownCursor });
})();
