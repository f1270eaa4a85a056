// Round by round: score, loss and GSI in lanes, and the figures of one round.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, NOTHING, el, flag, has, number, colour, stroke, tip } = report;
  const { NO_ROUND, FLAGS, scored, scoreTitle, run, flagged, kind, flagsOf } = report;
  const { show, within, vertical, dot, axis, titled, roundAxis, zoomed, below, zooms, line } = report;

  function lanes(of) {
    const dashed = { lineStyle: { color: colour("faint"), width: 1.5, type: [5, 4] }, z: 2 };
    const calm = { lineStyle: { color: colour("accent"), type: [2, 3], opacity: 0.85 } };
    const all = [
      {
        name: scoreTitle(of.score), share: 3,
        lines: [[of.score.words, of.scores, {}], ["averaged", of.averaged, calm], ["validation", of.validation, dashed]],
      },
      { name: "Loss", share: 2, lines: [["test loss", of.test_loss, {}], ["training loss", of.train_loss, dashed]] },
      { name: "GSI", share: 3, lines: [["GSI", of.gsi, {}], ["usual GSI", of.usual, dashed]] },
    ];
    for (const lane of all) lane.lines = lane.lines.filter(([, values]) => has(values));
    return all.filter((lane) => lane.lines.length);
  }

  function layout(box, parts, bottom) {
    const [gap, total] = [38, parts.reduce((sum, lane) => sum + lane.share, 0)];
    const room = box.clientHeight - bottom - gap * parts.length;
    let top = 0;
    for (const lane of parts) {
      lane.top = top + gap;
      lane.height = (room * lane.share) / total;
      top = lane.top + lane.height;
    }
    return parts;
  }

  /** Distrusted rounds: a thin line through every lane, and a shape of its own on the curve. */
  function marks(of, values, lane) {
    const made = Object.entries(FLAGS).map(([name, { symbol }]) => ({
      type: "scatter", name, symbol, silent: true, xAxisIndex: lane, yAxisIndex: lane, z: 6,
      symbolSize: of.rounds.length > 200 ? 9 : 12,
      itemStyle: { color: colour(name), borderColor: colour("card"), borderWidth: 1.5, opacity: 1 },
      data: of.rounds.flatMap((round, i) => (of.alarm[i] === name && values[i] !== null ? [[round, values[i]]] : [])),
    }));
    return made.filter((series) => series.data.length);
  }

  function flagLines(of) {
    const data = of.rounds.flatMap((round, i) => {
      const what = kind(of, i);
      if (what === "usual" || what === "not judged") return [];
      const style = what === "skipped" ? { color: colour("faint"), type: "dotted", opacity: 0.9 }
        : { color: colour(what), type: "solid", opacity: of.rounds.length > 200 ? 0.2 : 0.3 };
      return [{ xAxis: round, lineStyle: { ...style, width: 1 } }];
    });
    return { silent: true, animation: false, symbol: "none", label: { show: false }, data };
  }

  function roundsOption(box) {
    const of = run();
    const [left, right] = [46, 18];
    const parts = layout(box, lanes(of), below(of.rounds.length));
    Object.assign(box, { lanes: parts, grid: { left, right } });
    const option = { grid: [], xAxis: [], yAxis: [], series: [] };
    option.dataZoom = zooms(of.rounds.length, parts.map((_, i) => i), left, right);
    parts.forEach((lane, i) => {
      const last = i === parts.length - 1;
      const at = { gridIndex: i };
      option.grid.push({ left, right, top: lane.top, height: lane.height, outerBoundsMode: "none" });
      option.xAxis.push(roundAxis(of.rounds, { ...at, axisLabel: { show: last } }));
      option.yAxis.push(axis({ ...at, scale: true, splitNumber: lane.share + 1, ...titled(lane.name, left) }));
      const own = { xAxisIndex: i, yAxisIndex: i };
      const series = lane.lines.map(([name, values, more]) => ({ ...line(values, of.rounds, name, more), ...own }));
      series[0].markLine = flagLines(of);
      option.series.push(...series, ...(lane.share > 2 ? marks(of, lane.lines[0][1], i) : []));
    });
    return option;
  }

  function drawRounds() {
    const of = run();
    const why = !of.rounds.length ? NO_ROUND
      : lanes(of).length ? "" : "The rounds have no figures: none was tested or stepped.";
    show("rounds", why, roundsOption);
    const sample = (name, dash, text) => el("span", {}, stroke(name, dash), ` ${text}`);
    const [left, right, escape] = ["←", "→", "Esc"].map((text) => el("kbd", {}, text));
    const zoom = zoomed(of.rounds.length) ? ", Ctrl and wheel zoom" : "";
    const hints = el("span", { class: "hint" }, left, " ", right, " move the round, ", escape, " lets go", zoom);
    const { words } = of.score;
    const full = sample("accent", "", `${words}, test loss, GSI`);
    const held = has(of.validation) ? `validation ${words}, ` : "";
    const dashed = sample("faint", "5 4", `${held}training loss, usual GSI`);
    const averaged = has(of.averaged) ? [sample("accent", "2 3", `${words} of the averaged model`)] : [];
    $("keys").replaceChildren(...(why ? [] : [full, ...averaged, dashed, hints]));
  }

  function roundsCursor(chart, i) {
    const of = run();
    const { lanes: parts, grid } = $("rounds");
    const x = chart.convertToPixel({ xAxisIndex: 0 }, of.rounds[i]);
    if (!within(chart, grid, x)) return [];
    const last = parts.at(-1);
    const shapes = [vertical(x, parts[0].top, last.top + last.height)];
    parts.forEach((lane, at) => {
      for (const [order, [, values, more]] of lane.lines.entries()) {
        if (values[i] === null) continue;
        const y = chart.convertToPixel({ yAxisIndex: at }, values[i]);
        const marked = order === 0 && lane.share > 2 && flagged(of, i);
        if (!marked) shapes.push(dot(x, y, more.z === 2 ? "faint" : "accent"));
      }
    });
    return shapes;
  }

  function figures(of, i) {
    const usual = of.usual[i];
    const [{ title }, told] = [of.score, scored(of.score)];
    const own = (part, from) => told(from?.[part][from.rounds.indexOf(of.rounds[i])]);
    const rows = [
      [title, told(of.scores[i])],
      [`${title}, averaged`, told(of.averaged?.[i])],
      [`${title}, validation`, told(of.validation?.[i])],
      [`${title}, averaged, validation`, told(of.averaged_validation?.[i])],
      ["Clients’ own, mean", own("mean", of.own)],
      ["Clients’ own, worst tenth", own("worst", of.own)],
      ["Clients’ own, averaged, mean", own("mean", of.averaged_own)],
      ["Test loss", number(of.test_loss[i])],
      ["Test loss, averaged", number(of.averaged_loss?.[i])],
      ["Training loss", number(of.train_loss[i])],
      ["GSI", number(of.gsi[i]), usual === null ? "" : `usual ${number(usual)}`],
      ["GSI before the filter", number(of.gsi_unfiltered?.[i])],
      ["Label similarity", number(of.similarity?.[i])],
    ];
    return rows.filter(([, value]) => value !== NOTHING);
  }

  /** The first of a cohort, which may be listed in part only. */
  function names(cohort, size, most = 8) {
    const shown = cohort.slice(0, most).map(([id]) => String(id));
    const more = size - shown.length;
    return more ? `${shown.join(", ")} and ${more} more` : shown.join(", ") || "nobody";
  }

  function roundTip(event, i) {
    const of = run();
    const what = kind(of, i);
    const rows = figures(of, i).filter(([name]) => !/filter|similarity/.test(name));
    rows.push(["Cohort", names(of.cohorts[i], of.sizes[i])]);
    const doubted = of.cohorts[i].filter((one) => flagsOf(one[6]).length);
    if (doubted.length) rows.push(["Flagged", names(doubted, of.flagged[i])]);
    tip(event, `Round ${of.rounds[i]}`, rows, what === "usual" ? null : flag(what));
  }

  Object.assign(report, { drawRounds, roundsCursor, figures, roundTip });
})();
