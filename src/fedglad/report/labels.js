// What needs the clients' labels: GSI against label similarity, and the classes of a cohort.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, el, factor, has, percent, plural, colour, tip } = report;
  const { NO_ROUND, FLAGS, run, place, flagged } = report;
  const { show, axis, titled } = report;

  const GRID = { left: 46, right: 20, top: 38, bottom: 54, outerBoundsMode: "none" };

  function fitOption() {
    const { rounds, similarity, gsi, fit, ...of } = run();
    const shape = (i) => (flagged(of, i) ? FLAGS[of.alarm[i]].symbol : "circle");
    const points = rounds.map((_, i) => ({
      value: [similarity[i], gsi[i]],
      symbol: shape(i),
      symbolSize: flagged(of, i) ? 12 : 8,
      itemStyle: { color: colour(flagged(of, i) ? of.alarm[i] : "accent"), opacity: flagged(of, i) ? 1 : 0.6 },
    }));
    const known = similarity.filter((x, i) => x !== null && gsi[i] !== null);
    const ends = [Math.min(...known), Math.max(...known)];
    const dashed = { color: colour("ink"), width: 1.5, type: "dashed" };
    const straight = fit ? ends.map((x) => [x, fit.intercept + fit.slope * x]) : [];
    return {
      grid: GRID,
      xAxis: axis({ scale: true, ...titled("Label similarity of cohort and population") }),
      yAxis: axis({ scale: true, ...titled("GSI", GRID.left) }),
      series: [
        { type: "scatter", name: "rounds", data: points, silent: true, z: 3 },
        { type: "line", name: "fit", data: straight, showSymbol: false, silent: true, lineStyle: dashed, z: 2 },
      ],
    };
  }

  function drawFit() {
    const { similarity, gsi, fit } = run();
    const some = has(similarity?.map((x, i) => (gsi[i] === null ? null : x)));
    const why = "The labels of this run’s clients are not known, as in a real federation, so there is nothing to "
      + "compare GSI with.";
    show("fit", some ? "" : why, fitOption);
    const size = fit ? Math.abs(fit.r) : 0;
    const how = size >= 0.7 ? "strong" : size >= 0.4 ? "clear" : size >= 0.2 ? "weak" : "no";
    const way = fit?.r < 0 && size >= 0.2 ? ", and the wrong way round" : "";
    const r = () => el("b", {}, `r = ${fit.r.toFixed(2)}`);
    const said = fit ? ["Pearson ", r(), ` over ${plural(fit.n, "round")}: ${how} relation${way}.`]
      : [some ? "Too few rounds, or too little variety, for a line." : ""];
    $("fit-words").replaceChildren(...said);
  }

  function fitCursor(chart, i) {
    const { similarity, gsi } = run();
    if (similarity[i] === null || gsi[i] === null) return [];
    const [cx, cy] = chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [similarity[i], gsi[i]]);
    const style = { fill: "none", stroke: colour("ink"), lineWidth: 2 };
    return [new echarts.graphic.Circle({ shape: { cx, cy, r: 10 }, style, silent: true, z: 50 })];
  }

  function nearest(chart, event) {
    const { similarity, gsi, rounds } = run();
    let [best, near] = [-1, 24];
    rounds.forEach((_, i) => {
      if (similarity[i] === null || gsi[i] === null) return;
      const [x, y] = chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [similarity[i], gsi[i]]);
      const far = Math.hypot(x - event.offsetX, y - event.offsetY);
      if (far < near) [best, near] = [i, far];
    });
    return best;
  }

  function labelsOption(i) {
    const { labels } = run();
    const shares = labels.cohorts[i] ?? labels.population.map(() => null);
    const classes = labels.population.map((_, c) => String(c));
    const wide = Math.max(6, Math.min(44, (0.7 * ($("labels").clientWidth - GRID.left - GRID.right)) / classes.length));
    return {
      grid: GRID,
      xAxis: axis({ type: "category", data: classes, splitLine: { show: false }, ...titled("Class") }),
      yAxis: axis({ min: 0, max: Math.min(100, Math.ceil(10 * labels.most) * 10), ...titled("Share, %", GRID.left) }),
      series: [
        {
          type: "bar", name: "cohort", data: shares.map((x) => (x === null ? null : 100 * x)), silent: true,
          barMaxWidth: 38, barCategoryGap: "30%",
          itemStyle: { color: colour("accent"), opacity: 0.75, borderRadius: [3, 3, 0, 0] },
        },
        {
          type: "scatter", name: "population", data: labels.population.map((x) => 100 * x), silent: true, z: 5,
          symbol: "rect", symbolSize: [wide, 3], itemStyle: { color: colour("ink"), opacity: 1 },
        },
      ],
    };
  }

  function drawLabels() {
    const { labels, rounds, similarity } = run();
    const i = place();
    const unknown = "The labels of this run’s clients are not known: its folder has no labels.json, as in a real "
      + "federation.";
    const why = !labels ? unknown : rounds.length ? "" : NO_ROUND;
    show("labels", why, () => labelsOption(i));
    const alike = similarity?.[i] ?? null;
    const said = i < 0 ? "No round chosen: only the population is shown."
      : `Round ${rounds[i]}${labels?.cohorts[i] ? "" : " (the labels of its cohort are not in this page)"}`;
    const rest = alike === null ? []
      : [": similarity to the population ", el("b", {}, factor(alike)), ", where 1 is the same mix."];
    $("labels-words").replaceChildren(...(why ? [""] : [said, ...rest]));
  }

  function labelsTip(event, chart) {
    const { labels } = run();
    const c = chart.convertFromPixel({ xAxisIndex: 0 }, event.offsetX);
    const i = place();
    if (!(c in labels.population)) return tip(null);
    const cohort = !labels.cohorts[i] ? [] : [["Cohort", percent(100 * labels.cohorts[i][c])]];
    return tip(event, `Class ${c}`, [...cohort, ["Population", percent(100 * labels.population[c])]]);
  }

  Object.assign(report, { drawFit, fitCursor, nearest, drawLabels, labelsTip });
})();
