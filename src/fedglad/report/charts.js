// What the charts have in common: making them, axes, lines, zoom, cursors.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, colour, set } = report;

  const CHARTS = ["compare", "rounds", "heat", "fit", "labels", "own"];
  const chart = (id) => echarts.getInstanceByDom($(id));
  const zoomed = (count) => count >= 40;
  const below = (count) => (zoomed(count) ? 64 : 36); // room for the axis of rounds, and for the zoom

  /** Draws a chart, or says why there is none. The user's zoom is kept. */
  function show(id, why, build) {
    const box = $(id);
    let made = chart(id);
    box.classList.toggle("empty", Boolean(why));
    if (why) {
      made?.dispose();
      box.replaceChildren(why);
      for (const name of ["role", "tabindex", "aria-label"]) box.removeAttribute(name);
      return;
    }
    if (made) made.resize();
    else {
      box.replaceChildren();
      made = echarts.init(box, null, { renderer: "canvas" });
      report.listen(id, made);
    }
    const zoom = made.getOption()?.dataZoom?.[0];
    const option = build(box);
    if (zoom && (zoom.start > 0 || zoom.end < 100)) {
      const { startValue, endValue } = zoom;
      for (const one of option.dataZoom ?? []) Object.assign(one, { startValue, endValue });
    }
    const font = { fontFamily: colour("font"), fontSize: 12, color: colour("soft") };
    made.setOption({ animation: false, textStyle: font, ...option }, { notMerge: true });
    set(box, { role: "slider", tabindex: 0, "aria-label": `${box.dataset.about}. Arrow keys choose the round.` });
  }

  /** Draws lines over a chart without its layout being done again. */
  function overlay(made, shapes) {
    const zr = made.getZr();
    if (made.overlay) zr.remove(made.overlay);
    made.overlay = new echarts.graphic.Group();
    for (const shape of shapes) made.overlay.add(shape);
    zr.add(made.overlay);
  }

  /** Whether x, in pixels, is in the part of the chart that is zoomed to. */
  const within = (made, grid, x) => x >= grid.left - 1 && x <= made.getWidth() - grid.right + 1;

  function vertical(x, top, bottom) {
    const style = { stroke: colour("ink"), lineWidth: 1, opacity: 0.55 };
    return new echarts.graphic.Line({ shape: { x1: x, x2: x, y1: top, y2: bottom }, style, silent: true, z: 50 });
  }

  function dot(x, y, name) {
    const style = { fill: colour(name), stroke: colour("card"), lineWidth: 2 };
    return new echarts.graphic.Circle({ shape: { cx: x, cy: y, r: 4 }, style, silent: true, z: 60 });
  }

  function axis(more) {
    const rule = { lineStyle: { color: colour("rule") } };
    const label = { color: colour("soft"), fontSize: 12, hideOverlap: true };
    const bare = { axisLine: { show: false, ...rule }, axisTick: { show: false }, splitLine: { show: true, ...rule } };
    return { type: "value", ...bare, ...more, axisLabel: { ...label, ...more.axisLabel } };
  }

  /** An axis title: above the axis of values, or under that of the others. */
  function titled(name, left = 0) {
    const style = { color: colour("ink"), fontWeight: 600, fontSize: 13 };
    if (!left) return { name, nameLocation: "middle", nameGap: 30, nameTextStyle: style };
    return { name, nameGap: 12, nameTextStyle: { ...style, align: "left", padding: [0, 0, 0, 8 - left] } };
  }

  function roundAxis(rounds, more = {}) {
    const [first, last] = [rounds[0], rounds.at(-1)];
    const wide = first === last ? 0.5 : 0;
    const whole = (x) => (Number.isInteger(x) ? String(x) : "");
    const label = { formatter: whole, showMaxLabel: true, ...more.axisLabel };
    const plain = { splitLine: { show: false }, axisLine: { show: true, lineStyle: { color: colour("rule") } } };
    return axis({ min: first - wide, max: last + wide, minInterval: 1, ...plain, ...more, axisLabel: label });
  }

  function zooms(count, indices, left, right) {
    if (!zoomed(count)) return [];
    const same = { xAxisIndex: indices, filterMode: "none" };
    const slider = {
      type: "slider", left, right, bottom: 12, height: 18, moveHandleSize: 0, borderColor: "transparent",
      showDetail: false, showDataShadow: false, brushSelect: false,
      backgroundColor: "transparent", fillerColor: colour("hover"),
      handleStyle: { color: colour("card"), borderColor: colour("faint") },
    };
    const inside = { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: false, moveOnMouseWheel: false };
    return [{ ...same, ...inside }, { ...same, ...slider }];
  }

  function line(values, rounds, name, more = {}) {
    const filled = values.filter((x) => x !== null).length;
    return {
      type: "line", name, connectNulls: true, symbolSize: 5, silent: true,
      data: rounds.map((round, i) => [round, values[i]]),
      showSymbol: filled < 2 || (filled < 80 && filled < 0.7 * rounds.length),
      lineStyle: { width: 2, color: colour("accent"), ...more.lineStyle },
      itemStyle: { color: more.lineStyle?.color ?? colour("accent") },
      z: more.z ?? 3,
    };
  }

  Object.assign(report, {
    CHARTS, chart, show, overlay, within, vertical, dot, axis, titled, roundAxis, zoomed, below, zooms, line,
  });
})();
