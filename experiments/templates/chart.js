// Draws each <figure class="chart"> from the JSON in it: hover names the nearest point, the legend hides a series, and
// boxes make an axis logarithmic. Markup is parsed as HTML, which knows SVG without its namespace.
const WIDTH = 640, HEIGHT = 400, LEFT = 62, RIGHT = 14, TOP = 12, BOTTOM = 46, NEAR = 60, MARKS = 8;
const MARKERS = {
  "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "s": "M-4 -4h8v8h-8z", "^": "M0 -5L5 4H-5z", "v": "M0 5L5 -4H-5z",
  "D": "M0 -5.5L5.5 0L0 5.5L-5.5 0z", "P": "M-1.5 -5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
  "X": "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0z",
  "*": "M0 -6L1.5 -2H6L2.4 .6L3.8 5L0 2.3L-3.8 5L-2.4 .6L-6 -2H-1.5z",
};
const text = (value) => String(value).replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);
const plain = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });

function linearTicks([low, high]) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1;
  return Array.from({ length: count }, (_, index) => (first + index) * step);
}

function logTicks([low, high]) {
  const found = [];
  const digits = high / low > 500 ? [1] : [1, 2, 3, 5, 7];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const digit of digits) found.push(digit * 10 ** power);
  }
  const inside = found.filter((each) => each >= low && each <= high);
  return inside.length > 1 ? inside : linearTicks([low, high]);
}

function axis(values, log, begin, end) {
  let low = Math.min(...values), high = Math.max(...values);
  const scale = log ? Math.log : (value) => value;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  const room = (scale(high) - scale(low)) * 0.04;
  const from = scale(low) - room, to = scale(high) + room;
  const bounds = log ? [Math.exp(from), Math.exp(to)] : [from, to];
  return {
    ticks: log ? logTicks(bounds) : linearTicks(bounds),
    place: (value) => begin + (scale(value) - from) / (to - from) * (end - begin),
  };
}

function frame(chart, x, y) {
  const rows = y.ticks.map((each) => `<line x1="${LEFT}" x2="${WIDTH - RIGHT}" y1="${y.place(each)}" y2="${y.place(each)}"/>
    <text x="${LEFT - 8}" y="${y.place(each) + 4}" text-anchor="end">${plain(each)}</text>`);
  const columns = x.ticks.map((each) => `<line y1="${TOP}" y2="${HEIGHT - BOTTOM}" x1="${x.place(each)}" x2="${x.place(each)}"/>
    <text x="${x.place(each)}" y="${HEIGHT - BOTTOM + 18}" text-anchor="middle">${plain(each)}</text>`);
  const middle = (TOP + HEIGHT - BOTTOM) / 2;
  return `<g class="frame">${rows.join("")}${columns.join("")}
    <text x="${(LEFT + WIDTH - RIGHT) / 2}" y="${HEIGHT - 8}" text-anchor="middle">${text(chart.across)}</text>
    <text transform="translate(14 ${middle}) rotate(-90)" text-anchor="middle">${text(chart.up)}</text></g>`;
}

function mark(series, [left, top], size = 1) {
  return `<path d="${MARKERS[series.marker]}" fill="${series.color}" transform="translate(${left} ${top}) scale(${size})"/>`;
}

function drawn(series, index, lines) {
  if (!lines) return series.places.map((place) => mark(series, place, 1.6)).join("");
  const every = Math.max(1, Math.floor(series.places.length / MARKS));
  const marks = series.places.filter((_, place) => place % every === index % every);
  const line = series.places.map(([left, top]) => `${left.toFixed(1)},${top.toFixed(1)}`).join(" ");
  return `<polyline points="${line}" fill="none" stroke="${series.color}" stroke-width="2"
    ${series.dashed ? 'stroke-dasharray="6 4"' : ""}/>${marks.map((place) => mark(series, place)).join("")}`;
}

function draw(figure, chart) {
  const log = (name) => figure.querySelector(`input[name=${name}]`).checked;
  const usable = ([x, y]) => (!log("x") || x > 0) && (!log("y") || y > 0);
  const shown = chart.series.filter((each) => !each.hidden && each.points.some(usable));
  const points = shown.flatMap((each) => each.points.filter(usable));
  const svg = figure.querySelector("svg");
  figure.shown = [];
  if (!points.length) { svg.innerHTML = ""; return; }
  const x = axis(points.map((each) => each[0]), log("x"), LEFT, WIDTH - RIGHT);
  const y = axis(points.map((each) => each[1]), log("y"), HEIGHT - BOTTOM, TOP);
  for (const series of shown) {
    series.used = series.points.filter(usable);
    series.places = series.used.map((each) => [x.place(each[0]), y.place(each[1])]);
  }
  figure.shown = shown;
  const curves = shown.map((each) => drawn(each, chart.series.indexOf(each), chart.lines));
  svg.innerHTML = `${frame(chart, x, y)}${curves.join("")}<g class="near"></g>`;
}

function nearest(figure, left, top) {
  let best = { distance: NEAR };
  for (const series of figure.shown) {
    series.places.forEach(([x, y], index) => {
      const distance = Math.hypot(x - left, y - top);
      if (distance < best.distance) best = { distance, series, index };
    });
  }
  return best;
}

function hover(figure, chart, event) {
  const box = figure.querySelector("svg").getBoundingClientRect(), zoom = WIDTH / box.width;
  const { series, index } = nearest(figure, (event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom);
  const near = figure.querySelector(".near"), tip = figure.querySelector(".tip");
  tip.hidden = !series;
  if (near) near.innerHTML = series ? mark(series, series.places[index], 2) : "";
  if (!series) return;
  const [x, y] = series.used[index], [left, top] = series.places[index];
  tip.innerHTML = `<b>${text(series.name)}</b><br>${text(chart.across)}: ${plain(x)}<br>${text(chart.up)}: ${plain(y)}`;
  tip.style.top = `${top / zoom + 14}px`;
  tip.style.left = `${Math.min(left / zoom + 14, box.width - tip.offsetWidth)}px`;
}

function legend(figure, chart) {
  for (const series of chart.series) {
    const entry = document.createElement("button");
    entry.type = "button";
    entry.setAttribute("aria-pressed", "true");
    const line = chart.lines ? `<path d="M0 8H28" stroke="${series.color}" stroke-width="2" ${series.dashed ? 'stroke-dasharray="6 4"' : ""}/>` : "";
    entry.innerHTML = `<svg width="28" height="16">${line}${mark(series, [14, 8])}</svg> ${text(series.name)}`;
    entry.addEventListener("click", () => {
      series.hidden = !series.hidden;
      entry.setAttribute("aria-pressed", String(!series.hidden));
      draw(figure, chart);
    });
    figure.querySelector(".legend").append(entry);
  }
}

for (const figure of document.querySelectorAll("figure.chart")) {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  legend(figure, chart);
  for (const box of figure.querySelectorAll("input")) box.addEventListener("change", () => draw(figure, chart));
  svg.addEventListener("pointermove", (event) => hover(figure, chart, event));
  svg.addEventListener("pointerleave", () => { figure.querySelector(".tip").hidden = true; });
  draw(figure, chart);
}
