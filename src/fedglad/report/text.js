// What comes from a run is hostile: it reaches the page as text nodes and as text on a canvas, never as
// HTML, so ECharts' own tooltips (HTML) are not used. The scripts share this one global, in the order of page.html.
window.fedgladReport = {};

// Numbers as text, and elements.
(() => {
  "use strict";
  const NOTHING = "–";
  const $ = (id) => document.getElementById(id);
  const missing = (x) => x === null || x === undefined;
  const has = (values) => Boolean(values?.some((x) => !missing(x)));
  const percent = (x) => (missing(x) ? NOTHING : `${x.toFixed(1)} %`);
  const factor = (x) => (missing(x) ? NOTHING : x.toFixed(2));
  const plural = (n, one) => `${new Intl.NumberFormat("en").format(n)} ${one}${n === 1 ? "" : "s"}`;
  const named = (kind) => kind.replaceAll(" ", "-"); // a class of the style sheet
  const flag = (kind) => el("span", { class: `flag ${named(kind)}` }, kind); // of a round
  const doubt = (kind) => el("span", { class: `doubt ${named(kind)}` }, kind); // of a client
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function number(x) {
    if (missing(x)) return NOTHING;
    const size = Math.abs(x);
    if (size > 0 && (size < 1e-3 || size >= 1e7)) return x.toExponential(1).replace("e", " × 10^").replace("+", "");
    const three = { minimumSignificantDigits: 3, maximumSignificantDigits: 3 };
    return new Intl.NumberFormat("en", size >= 1000 ? { maximumFractionDigits: 0 } : three).format(x);
  }

  function set(node, attributes) {
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  }

  function el(tag, attributes = {}, ...children) {
    const node = set(document.createElement(tag), attributes);
    node.append(...children.filter((child) => !missing(child)));
    return node;
  }

  function svg(tag, attributes, ...children) {
    const node = set(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes);
    node.append(...children);
    return node;
  }

  /** A piece of a chart's line, for its legend. */
  function stroke(name, dash) {
    const path = svg("path", { d: "M1 4H25", "stroke-width": 2.5, "stroke-dasharray": dash });
    path.style.stroke = `var(--${name})`;
    return svg("svg", { width: 26, height: 8, "aria-hidden": "true" }, path);
  }

  /** Rows are lists of texts or cells, or made already; columns in `left` are text. */
  function table(heads, rows, left) {
    const cell = (tag, text, at) => {
      if (text instanceof Node) return text;
      const scope = tag === "th" ? { scope: "col" } : {};
      return el(tag, left.includes(at) ? { class: "text", ...scope } : scope, text);
    };
    const row = (tag, texts) => {
      if (texts instanceof Node) return texts;
      return el("tr", {}, ...texts.map((text, at) => cell(tag, text, at)));
    };
    const body = rows.map((texts) => row("td", texts));
    return el("table", {}, el("thead", {}, row("th", heads)), el("tbody", {}, ...body));
  }

  /** Shows the tooltip at the pointer; without an event, hides it. */
  function tip(event, title, rows = [], more = null) {
    const box = $("tip");
    box.hidden = !event;
    if (!event) return;
    const lines = rows.map(([name, value, small]) => {
      const shown = el("span", {}, small ? `${value} (${small})` : value);
      return el("div", { class: "row" }, el("span", {}, name), shown);
    });
    box.replaceChildren(el("b", {}, title), ...(more ? [more] : []), ...lines);
    const { left, top } = event.box.getBoundingClientRect();
    const [x, y] = [left + event.offsetX, top + event.offsetY];
    const wide = document.documentElement.clientWidth;
    const at = x + 18 + box.offsetWidth < wide - 8 ? x + 18 : x - 18 - box.offsetWidth;
    box.style.left = `${Math.max(8, Math.min(at, wide - 8 - box.offsetWidth)) + window.scrollX}px`;
    box.style.top = `${Math.max(8, y - box.offsetHeight - 12) + window.scrollY}px`;
  }

  Object.assign(window.fedgladReport, {
    NOTHING, $, missing, has, percent, factor, plural, named, flag, doubt, colour, number, set, el, svg, stroke, table, tip,
  });
})();
