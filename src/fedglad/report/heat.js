// Heat map of groups by rounds.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, el, factor, plural, colour, tip } = report;
  const { NO_ROUND, HEATS, state, run } = report;
  const { show, within, below, zooms } = report;

  const MARGIN = 18; // above, and at the right
  let cells = null; // one pixel a value

  function matching() {
    const asked = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const all = run().heat.groups.map((_, i) => i);
    return all.filter((i) => asked.every((word) => run().heat.groups[i].toLowerCase().includes(word)));
  }

  /** How far from 1 the colours reach: 19 of 20 values are within. */
  function reach(heat) {
    heat.reach ??= {};
    if (state.heat in heat.reach) return heat.reach[state.heat];
    const away = Float64Array.from(heat[state.heat].flat().filter((x) => x !== null), (x) => Math.abs(x - 1)).sort();
    return (heat.reach[state.heat] = Math.max(away[Math.floor(0.95 * (away.length - 1))] ?? 0, 0.02));
  }

  /** 257 colours, from the lowest value to the highest; 1 is in the middle. */
  function ramp() {
    const names = ["low-end", "low-half", "middle", "high-half", "high-end"];
    const stops = names.map((name) => echarts.color.parse(colour(name)));
    return Array.from({ length: 257 }, (_, i) => {
      const at = Math.min(Math.floor(i / 64), 3);
      const mixed = [0, 1, 2].map((c) => Math.round(stops[at][c] + (stops[at + 1][c] - stops[at][c]) * (i / 64 - at)));
      return (255 << 24) | (mixed[2] << 16) | (mixed[1] << 8) | mixed[0];
    });
  }

  /** All values as pixels of a small canvas: 100,000 of them are drawn as quickly as ten. */
  function paint(shown, values, most) {
    const canvas = el("canvas");
    [canvas.width, canvas.height] = [run().rounds.length, shown.length];
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const pixels = new Int32Array(image.data.buffer);
    const colours = ramp();
    shown.forEach((group, y) => values[group].forEach((value, x) => {
      if (value === null) return;
      pixels[y * canvas.width + x] = colours[Math.round(128 + 128 * Math.min(Math.max((value - 1) / most, -1), 1))];
    }));
    context.putImageData(image, 0, 0);
    return canvas;
  }

  function heatItem(params, api) {
    const { x, y, width, height } = params.coordSys;
    const [w, h] = api.size([1, 1]);
    const [cx, cy] = api.coord([0, 0]);
    const ratio = window.devicePixelRatio || 1;
    const view = el("canvas");
    [view.width, view.height] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
    const context = view.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = w * ratio < 1 || h * ratio < 1;
    const [left, top] = [cx - w / 2 - x, cy - h / 2 - y];
    context.drawImage(cells, left, top, cells.width * w, cells.height * h);
    if (w >= 5) for (let i = 1; i < cells.width; i++) context.clearRect(left + i * w - 0.5, 0, 1, height);
    if (h >= 8) for (let i = 1; i < cells.height; i++) context.clearRect(0, top + i * h - 0.5, width, 1);
    return { type: "image", silent: true, style: { image: view, x, y, width, height } };
  }

  function heatOption(box, shown) {
    const { rounds, heat } = run();
    const narrow = box.clientWidth < 600;
    const longest = Math.max(...shown.map((i) => heat.groups[i].length));
    const left = Math.min(narrow ? 112 : 230, 26 + 6.6 * longest);
    const bottom = below(rounds.length);
    const height = box.clientHeight - MARGIN - bottom;
    const gap = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => rounds.length / n <= (narrow ? 6 : 12)) ?? 1000;
    box.grid = { left, right: MARGIN, top: MARGIN, bottom, outerBoundsMode: "none" };
    const bare = { axisLine: { show: false }, axisTick: { show: false }, splitLine: { show: false } };
    const label = { color: colour("soft"), fontSize: 12 };
    const every = Math.ceil((15 * shown.length) / height);
    return {
      grid: box.grid,
      dataZoom: zooms(rounds.length, [0], left, MARGIN),
      xAxis: {
        type: "category", data: rounds.map(String), ...bare,
        axisLabel: { ...label, interval: (i, text) => i === 0 || text % gap === 0 },
      },
      yAxis: {
        type: "category", inverse: true, data: shown.map((i) => heat.groups[i]), ...bare,
        axisLabel: { ...label, width: left - 22, overflow: "truncate", interval: every - 1 },
      },
      series: [
        { type: "custom", data: [[0, 0]], encode: { x: 0, y: 1 }, clip: true, silent: true, renderItem: heatItem },
      ],
    };
  }

  function drawHeat() {
    const { heat, rounds, config } = run();
    $("heat-about").textContent = HEATS[state.heat][1];
    const shown = heat && rounds.length ? matching() : [];
    const plain = config?.["adapter.name"] === "none";
    const did = plain ? "was not adapted (adapter.name is none)" : "recorded no groups";
    const none = `This run ${did}, so there are no factors to show.`;
    const why = !rounds.length ? NO_ROUND
      : !heat?.groups.length ? none : shown.length ? "" : "No group has all of these words in its name.";
    $("filtered").textContent = heat ? `${shown.length} of ${plural(heat.groups.length, "group")}` : "";
    $("scale").hidden = Boolean(why);
    if (!why) {
      const most = reach(heat);
      cells = paint(shown, heat[state.heat], most);
      const height = Math.min(Math.max(shown.length * 22, 44), 620) + MARGIN + below(rounds.length);
      $("heat").style.height = `${height}px`;
      $("heat").shown = shown;
      $("scale").replaceChildren(`≤ ${factor(1 - most)}`, el("i"), `≥ ${factor(1 + most)}`);
    }
    show("heat", why, (box) => heatOption(box, shown));
  }

  function heatCursor(chart, i) {
    const { grid } = $("heat");
    const x = chart.convertToPixel({ xAxisIndex: 0 }, i);
    const [start, end] = [chart.convertToPixel({ xAxisIndex: 0 }, 0), chart.convertToPixel({ xAxisIndex: 0 }, 1)];
    const wide = run().rounds.length > 1 ? Math.max(end - start, 2) : chart.getWidth() - grid.left - grid.right;
    if (!within(chart, grid, x)) return [];
    const height = chart.getHeight() - grid.top - grid.bottom + 4;
    const shape = { x: x - wide / 2, y: grid.top - 2, width: wide, height };
    const style = { fill: "none", stroke: colour("ink"), lineWidth: 1.5 };
    return [new echarts.graphic.Rect({ shape, style, silent: true, z: 50 })];
  }

  function heatTip(event, i, chart) {
    const row = chart.convertFromPixel({ yAxisIndex: 0 }, event.offsetY);
    const group = $("heat").shown[row];
    const { heat, rounds } = run();
    if (group === undefined) return tip(null);
    const [scale, ratio] = [heat.scale[group][i], heat.ratio[group][i]].map(factor);
    return tip(event, heat.groups[group], [["Round", String(rounds[i])], ["Factor s", scale], ["GSI/B", ratio]]);
  }

  Object.assign(report, { drawHeat, heatCursor, heatTip });
})();
