// The pairs of the report: unpacked, filtered, sorted, listed, and shown one by one.
//
// Columns are typed arrays over the rows, so that a filter is one pass over numbers; texts are searched once each, in
// one string; the list has elements for the rows in view alone. Whatever comes from the data enters the page as text
// nodes, or as the address of an image behind a fixed prefix, and never as HTML.
"use strict";

const NARROW = "(max-width: 60rem)"; // where a pair is shown below the list, not beside it
const VERDICTS = ["right", "wrong", "equal", "tied"];
const [RIGHT, WRONG, EQUAL, TIED] = VERDICTS.keys();

/** Return the element with this id. */
const at = (id) => document.getElementById(id);

/** Return a new element; children that are strings become text. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Return header and columns of the block that explorer.py wrote. */
async function unpack(text) {
  const binary = atob(text);
  const packed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) packed[i] = binary.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const parse = (...part) => JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, ...part)));
  const header = parse(4, size);
  header.texts = parse(4 + size + header.texts);
  const kinds = { u1: Uint8Array, u4: Uint32Array, f4: Float32Array };
  const columns = new Map();
  for (const [name, [kind, offset, length]] of Object.entries(header.columns)) {
    columns.set(name, new kinds[kind](buffer, 4 + size + offset, length));
  }
  return { header, columns };
}

/** Return the positions of keys, a Float32Array without NaN, in ascending order; equal ones as they are. */
function sorted(keys) {
  // A number without a comparator sorts ten times as fast: the key's bits, in order as unsigned ones, and its position.
  const bits = new Uint32Array(keys.buffer);
  const numbers = Float64Array.from(bits, (key, i) => (key >>> 31 ? ~key >>> 0 : key + 2 ** 31) * 2 ** 21 + i);
  return Uint32Array.from(numbers.sort(), (number) => number % 2 ** 21);
}

// Numbers as the rest of the page writes them.
const minus = (text) => text.replace("-", "−");
const number = (value) => (Number.isNaN(value) ? "–" : minus(value.toFixed(2)).replace(/^−(0\.00)$/, "$1"));
const count = (value) => value.toLocaleString("en-US");
const percent = (share) => (share === null || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(1)}%`);

/** Searches every text once, in one lower-case string. */
class Texts {
  constructor(texts) {
    const lower = texts.map((text) => text.toLowerCase());
    this.ends = new Float64Array(texts.length); // where each text ends in the string
    let end = 0;
    lower.forEach((text, i) => {
      end += text.length + 1;
      this.ends[i] = end;
    });
    this.all = lower.join("\n") + "\n";
    this.all.indexOf("\n\n"); // V8 joins the pieces when they are first read
  }

  /** Return which texts contain the words: one byte each. */
  containing(words) {
    const hits = new Uint8Array(this.ends.length);
    let text = 0;
    for (let from = this.all.indexOf(words); from >= 0; from = this.all.indexOf(words, this.ends[text])) {
      text = this.after(from, text);
      hits[text] = 1;
    }
    return hits;
  }

  /** Return the first text, from `low` on, that ends after this position. */
  after(position, low) {
    let high = this.ends.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > position) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

/** All pairs, with one model as A and another, or none, as B. */
class Pairs {
  constructor({ header, columns }) {
    Object.assign(this, header);
    this.column = (...names) => columns.get(names.join("/"));
    this.roles = ["prompt", "chosen", "rejected"].map((role) => this.column("text", role));
    this.searched = new Texts(this.texts);
    this.searchedNames = new Texts(this.names);
    this.codes = new Map(this.groups.map(({ column }) => [column, this.column("group", column)]));
    this.kept = new Map(); // verdicts and orders, which cost more than a filter
  }

  once(key, compute) {
    if (!this.kept.has(key)) this.kept.set(key, compute());
    return this.kept.get(key);
  }

  /** Return a model's verdict on each row, as a position in VERDICTS; of an intervention if one is named. */
  verdicts(model, intervention = "") {
    return this.once(`verdicts ${model} ${intervention}`, () => {
      const tie = this.column("tie");
      const margins = this.margins(model, intervention);
      return Uint8Array.from(margins, (margin, row) => (tie[row] ? TIED : margin > 0 ? RIGHT : margin < 0 ? WRONG : EQUAL));
    });
  }

  margins(model, intervention = "") {
    return intervention ? this.column(model, intervention, "margin") : this.column(model, "margin");
  }

  /** Return for each row whether an intervention turns the model from right to not right, or back: one byte each. */
  flipped(model, interventions) {
    return this.once(`flipped ${model} ${interventions}`, () => {
      const [tie, plain] = [this.column("tie"), this.margins(model)];
      const flips = new Uint8Array(this.count);
      for (const name of interventions) {
        const altered = this.margins(model, name);
        for (let row = 0; row < this.count; row++) {
          if (plain[row] > 0 !== altered[row] > 0 && altered[row] === altered[row] && !tie[row]) flips[row] = 1; // no NaN
        }
      }
      return flips;
    });
  }

  /** Return all rows in an order; "-" before its name turns it round. Rows without the number, and ties, come last. */
  order(name, a, b) {
    return this.once(`order ${name} ${a} ${b}`, () => {
      const rows = Uint32Array.from({ length: this.count }, (_, row) => row);
      if (name === "data") return rows;
      const [first, second, tie] = [this.margins(a), b === null ? null : this.margins(b), this.column("tie")];
      const kinds = {
        margin: (row) => first[row],
        marginB: (row) => second[row],
        near: (row) => Math.abs(first[row]),
        apart: (row) => Math.abs(first[row] - second[row]),
      };
      const key = kinds[name.replace("-", "")];
      const sign = name.startsWith("-") ? -1 : 1;
      const keys = Float32Array.from(rows, (row) => (tie[row] || Number.isNaN(key(row)) ? Infinity : sign * key(row)));
      return sorted(keys);
    });
  }

  /** Return the rows that pass all filters, in order. */
  matching({ words, a, b, groups, verdict, low, high, flip, agree, order }) {
    const rows = new Uint32Array(this.count);
    const texts = words ? this.searched.containing(words) : null;
    const names = words ? this.searchedNames.containing(words) : null;
    const [prompts, chosen, rejected] = this.roles;
    const margins = this.margins(a);
    const verdicts = this.verdicts(a);
    const second = b === null ? null : { margins: this.margins(b), verdicts: this.verdicts(b) };
    const flipped = flip === null ? null : this.flipped(a, flip);
    const values = groups.map(([column, code]) => [this.codes.get(column), code]);
    let length = 0;
    for (const row of this.order(order, a, b)) {
      if (verdict !== null && verdicts[row] !== verdict) continue;
      if (margins[row] < low || margins[row] > high) continue;
      if (Number.isNaN(margins[row])) continue; // the model was not asked about this pair
      if (!values.every(([codes, code]) => codes[row] === code)) continue;
      if (flipped !== null && !flipped[row]) continue;
      if (agree) {
        if (verdicts[row] === TIED || Number.isNaN(second.margins[row])) continue;
        if (!AGREEMENTS[agree](verdicts[row] === RIGHT, second.verdicts[row] === RIGHT)) continue;
      }
      if (words && !(texts[prompts[row]] || texts[chosen[row]] || texts[rejected[row]] || names[row])) continue;
      rows[length++] = row;
    }
    return rows.subarray(0, length);
  }
}

const NEEDS_B = /marginB|apart/; // orders
const AGREEMENTS = {
  differ: (a, b) => a !== b,
  onlyA: (a, b) => a && !b,
  onlyB: (a, b) => b && !a,
  both: (a, b) => a && b,
  neither: (a, b) => !a && !b,
};

/** A grid of which only the rows in view have elements. `draw(row)` returns the cells of one. */
class List {
  constructor(grid, body, draw, open) {
    Object.assign(this, { grid, body, draw, open, rows: [], current: 0, pool: [] });
    this.head = grid.querySelector('[role="row"]');
    grid.addEventListener("scroll", () => this.render());
    grid.addEventListener("keydown", (event) => this.press(event));
    body.addEventListener("click", (event) => {
      const element = event.target.closest('[role="row"]');
      if (element) this.go(Number(element.dataset.position), matchMedia(NARROW).matches);
    });
    new ResizeObserver(() => this.render()).observe(grid);
  }

  /** List these rows, and go to one of them, or to the first. */
  show(rows, row) {
    this.rows = rows;
    this.grid.setAttribute("aria-rowcount", rows.length + 1);
    this.body.style.height = `${rows.length * this.height}px`;
    this.grid.scrollTop = 0;
    if (rows.length) this.go(Math.max(rows.indexOf(row), 0));
    else this.render();
  }

  /** Return the height of a row in pixels, which the style gives in rem. */
  get height() {
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    return rem * parseFloat(getComputedStyle(this.body).getPropertyValue("--row"));
  }

  render() {
    const height = this.height;
    const { scrollTop, clientHeight } = this.grid;
    const first = Math.max(Math.floor(scrollTop / height) - 2, 0);
    const last = Math.min(Math.ceil((scrollTop + clientHeight) / height) + 2, this.rows.length);
    const elements = [];
    for (let position = first; position < last; position++) {
      const element = make("div", { role: "row", id: `pair-${position}` }, ...this.draw(this.rows[position]));
      element.setAttribute("aria-rowindex", position + 2);
      element.setAttribute("aria-selected", position === this.current);
      element.dataset.position = position;
      element.style.top = `${position * height}px`;
      elements.push(element);
    }
    this.body.replaceChildren(...elements);
    if (this.rows.length) this.grid.setAttribute("aria-activedescendant", `pair-${this.current}`);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  /** Move to a position, scroll it into view and open it; `focus` moves the focus there, too. */
  go(position, focus = false) {
    if (!this.rows.length) return;
    this.current = Math.min(Math.max(position, 0), this.rows.length - 1);
    const height = this.height;
    const top = this.current * height;
    const room = this.grid.clientHeight - this.head.offsetHeight;
    if (top < this.grid.scrollTop) this.grid.scrollTop = top;
    if (top + height > this.grid.scrollTop + room) this.grid.scrollTop = top + height - room;
    this.render();
    this.open(this.rows[this.current], focus);
  }

  press(event) {
    if (event.target !== this.grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(Math.floor(this.grid.clientHeight / this.height) - 1, 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Enter: 0, " ": 0 };
    Object.assign(steps, { Home: -Infinity, End: Infinity });
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.go(this.current + steps[event.key], event.key === "Enter" || event.key === " ");
  }
}

/** The controls, the list, the comparison and the pair that is shown. */
class Explorer {
  constructor(pairs) {
    this.pairs = pairs;
    this.form = at("pairs-form");
    const open = (row, focus) => this.open(row, focus);
    this.list = new List(at("pairs-grid"), at("pairs-rows"), (row) => this.cells(row), open);
    this.fill();
    this.form.addEventListener("input", (event) => this.refresh(["a", "b"].includes(event.target.name)));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("reset", () => setTimeout(() => this.refresh())); // once the fields have been reset
    for (const button of at("pairs-grid").querySelectorAll("button")) {
      button.addEventListener("click", () => this.sort(button.dataset.order));
    }
    at("pair-previous").addEventListener("click", () => this.list.go(this.list.current - 1));
    at("pair-next").addEventListener("click", () => this.list.go(this.list.current + 1));
    at("pair").addEventListener("keydown", (event) => {
      if (event.key === "Escape") at("pairs-grid").focus();
    });
    this.refresh();
  }

  field(name) {
    return this.form.elements[name];
  }

  options(select, entries) {
    select.append(...entries.map(([value, label]) => make("option", { value }, label)));
  }

  /** Fill the selects with what the pairs have. */
  fill() {
    const { models, groups } = this.pairs;
    const labels = models.map(({ label }, number) => [number, label]);
    this.options(this.field("a"), labels);
    this.options(this.field("b"), labels);
    for (const [number, { name, values }] of groups.entries()) {
      const select = make("select", { name: `group-${number}` }, make("option", { value: "" }, "all"));
      this.options(select, values.map((value, code) => [code + 1, value || "(empty)"]));
      at("pairs-groups").before(make("label", {}, make("span", {}, name), select));
    }
    for (const element of this.form.querySelectorAll(".compares")) element.hidden = models.length < 2;
  }

  /** Return what the controls say. */
  read() {
    const value = (name) => this.field(name).value;
    const numeric = (name, otherwise) => (value(name) === "" ? otherwise : Number(value(name)));
    const a = Number(value("a"));
    const b = value("b") === "" || Number(value("b")) === a ? null : Number(value("b"));
    const codes = this.pairs.groups.map(({ column }, number) => [column, numeric(`group-${number}`, null)]);
    const groups = codes.filter(([, code]) => code !== null);
    const { interventions } = this.pairs.models[a];
    const flip = { "": null, any: interventions }[value("flip")];
    const order = b === null && NEEDS_B.test(value("order")) ? "data" : value("order");
    return {
      words: value("words").trim().toLowerCase(),
      verdict: numeric("verdict", null),
      low: numeric("low", -Infinity),
      high: numeric("high", Infinity),
      agree: b === null ? "" : value("agree"),
      flip: flip === undefined ? [value("flip")] : flip,
      ...{ a, b, groups, order },
    };
  }

  /** Offer the interventions of model A, and what needs a model B only with one. */
  offer() {
    const { a, b } = this.read();
    const flip = this.field("flip");
    const { interventions } = this.pairs.models[a];
    const before = flip.value;
    const views = interventions.map((name) => [name, this.pairs.views[name]]);
    flip.replaceChildren();
    this.options(flip, [["", "by any or none"], ["any", "by any of these"], ...views]);
    flip.value = [...interventions, "any"].includes(before) ? before : "";
    flip.disabled = !interventions.length;
    this.field("agree").disabled = b === null;
    for (const option of this.field("order").options) option.disabled = b === null && NEEDS_B.test(option.value);
  }

  /** Filter and list again; `stay` keeps the pair that is shown, if it passes. */
  refresh(stay = false) {
    this.offer();
    const state = this.read();
    const { a, b } = state;
    const row = stay ? this.list.rows[this.list.current] : -1;
    this.models = b === null ? [a] : [a, b];
    at("explorer").classList.toggle("two", b !== null);
    const rows = this.pairs.matching(state);
    at("pairs-count").textContent = this.sentence(rows, a, b);
    for (const header of at("pairs-grid").querySelectorAll("[aria-sort]")) {
      const { order } = header.querySelector("button").dataset;
      const directions = { [order]: "ascending", [`-${order}`]: "descending" };
      header.setAttribute("aria-sort", directions[state.order] ?? "none");
    }
    this.list.show(rows, row);
    at("pair").hidden = !rows.length;
    this.compare(a, b);
  }

  /** Return how many pairs are listed, and how many of them each model ranks right. */
  sentence(rows, a, b) {
    const listed = `${count(rows.length)} of ${count(this.pairs.count)} pairs`;
    const share = (model) => {
      const verdicts = this.pairs.verdicts(model);
      const margins = this.pairs.margins(model);
      let [right, decided] = [0, 0];
      for (const row of rows) {
        right += verdicts[row] === RIGHT ? 1 : verdicts[row] === EQUAL ? 0.5 : 0;
        decided += verdicts[row] !== TIED && !Number.isNaN(margins[row]);
      }
      return percent(right / decided);
    };
    if (!rows.length) return `${listed}: change the filters to see some.`;
    return `${listed}, ranked right: ${share(a)}${b === null ? "" : ` by A, ${share(b)} by B`}.`;
  }

  sort(order) {
    const field = this.field("order");
    field.value = field.value === order ? `-${order}` : order;
    this.refresh();
  }

  /** Return the cells of a row of the list. */
  cells(row) {
    const { names, groups, codes } = this.pairs;
    const cell = (name, ...children) => make("div", { role: "gridcell", class: name }, ...children);
    const prompt = this.text("prompt", row).slice(0, 200); // more than fits
    const first = groups[0] && groups[0].values[codes.get(groups[0].column)[row] - 1];
    const judged = this.models.map((model) => {
      const margin = make("b", {}, number(this.pairs.margins(model)[row]));
      return cell("judged", margin, this.verdict(model, row));
    });
    const name = cell("name", ...this.thumbnail(row), make("b", {}, names[row]), make("span", {}, prompt));
    return [name, cell("value", first ?? ""), ...judged];
  }

  /** Return the first picture of a pair that the page has. */
  thumbnail(row) {
    const { images, thumbnails } = this.pairs;
    const numbers = ["prompt", "chosen", "rejected"].flatMap((role) => images[this.pairs.column("images", role)[row]]);
    const shown = numbers.find((image) => image in thumbnails);
    return shown === undefined ? [] : [make("img", { src: `data:image/jpeg;base64,${thumbnails[shown]}`, alt: "" })];
  }

  /** Return the verdict as an element. */
  verdict(model, row, intervention = "") {
    const margin = this.pairs.margins(model, intervention)[row];
    if (Number.isNaN(margin)) return make("span", { class: "verdict" }, "not scored");
    const verdict = this.pairs.verdicts(model, intervention)[row];
    return make("span", { class: `verdict ${VERDICTS[verdict]}` }, VERDICTS[verdict]);
  }

  text(role, row) {
    return this.pairs.texts[this.pairs.column("text", role)[row]];
  }

  /** Show a pair: prompt, images, both answers, and all its scores. */
  open(row, focus = false) {
    const { pairs } = this;
    at("pair-title").textContent = pairs.names[row];
    const facts = pairs.groups.map(({ column, name, values }) => [name, values[pairs.codes.get(column)[row] - 1]]);
    const sentences = facts.filter(([, value]) => value).map(([name, value]) => make("span", {}, `${name}: ${value}`));
    at("pair-facts").replaceChildren(...sentences);
    const part = (role, title) => {
      const section = make("section", { class: role }, make("h4", {}, title));
      section.append(...this.images(role, row));
      if (this.text(role, row)) section.append(make("p", { class: "text" }, this.text(role, row)));
      return section;
    };
    const titles = pairs.column("tie")[row] ? ["first of a tie", "second of a tie"] : ["preferred", "rejected"];
    at("pair-texts").replaceChildren(part("prompt", "prompt"), part("chosen", titles[0]), part("rejected", titles[1]));
    at("pair-scores").replaceChildren(this.scores(row, titles));
    if (focus) at("pair-title").focus();
  }

  /** Return the images of a prompt or an answer: a thumbnail where the page has one, otherwise its path as a link. */
  images(role, row) {
    const { paths, images, thumbnails } = this.pairs;
    const numbers = images[this.pairs.column("images", role)[row]];
    if (!numbers.length) return [];
    const elements = numbers.map((image, i) => {
      const what = `image ${numbers.length > 1 ? `${i + 1} ` : ""}of the ${role === "prompt" ? "prompt" : `${role} answer`}`;
      if (image in thumbnails) return make("img", { src: `data:image/jpeg;base64,${thumbnails[image]}`, alt: what });
      const path = paths[image].split("/").map(encodeURIComponent).join("/");
      return make("a", { href: `file://${path}` }, `${what}: ${paths[image]}`);
    });
    return [make("div", { class: "pictures" }, ...elements)];
  }

  /** Return the table of a pair's scores, as it is and under each intervention, by each model. */
  scores(row, titles) {
    const { models, views } = this.pairs;
    const named = [...new Set(this.models.flatMap((model) => models[model].interventions))];
    const scored = named.filter((name) => this.models.some((model) => this.pairs.margins(model, name)?.[row] > -Infinity));
    const cells = (model, name) => {
      const margins = this.pairs.margins(model, name);
      if (!margins) return [make("td", { colspan: 3 }, "not scored")];
      const rejected = this.pairs.column(...[model, name, "rejected"].filter((part) => part !== ""))[row];
      const flips = name && this.pairs.flipped(model, [name])[row] ? make("i", {}, "flipped to") : "";
      const verdict = make("div", {}, flips, this.verdict(model, row, name));
      const numbers = [rejected + margins[row], rejected].map((value) => make("td", {}, number(value)));
      return [...numbers, make("td", {}, make("b", {}, number(margins[row])), verdict)];
    };
    const lines = ["", ...scored].map((name) => {
      const view = make("th", { scope: "row" }, name ? views[name] : "as it is");
      return make("tr", {}, view, ...this.models.flatMap((model) => cells(model, name)));
    });
    const head = this.head(["what the model saw", ...this.models.flatMap(() => [...titles, "margin"])]);
    const names = this.models.length > 1 ? ["A", "B"] : [models[this.models[0]].label];
    const labels = names.map((name) => make("th", { colspan: 3, scope: "colgroup" }, name));
    head.prepend(make("tr", {}, make("td", {}), ...labels));
    const absent = named.length - scored.length;
    const caption = absent ? `Scores; ${absent} further interventions were not scored for this pair` : "Scores";
    return make("table", {}, make("caption", {}, caption), head, make("tbody", {}, ...lines));
  }

  head(titles) {
    return make("thead", {}, make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title))));
  }

  /** Set both models side by side: how often they agree, and their accuracies, overall and by category. */
  compare(a, b) {
    const panel = at("pairs-compared");
    panel.hidden = b === null;
    if (b === null) return;
    const table = this.pairs.once(`compared ${a} ${b}`, () => {
      const [first, second] = [this.pairs.models[a], this.pairs.models[b]];
      const line = (title, agreement, shares) => {
        const cells = [...shares.map((share) => this.share(share)), ...agreement.map(count)];
        return make("tr", {}, make("th", { scope: "row" }, title), ...cells.map((cell) => make("td", {}, cell)));
      };
      const lines = this.pairs.groups.flatMap(({ column, name, values }) => {
        const agreements = this.agreements(a, b, this.pairs.codes.get(column), values.length + 1).slice(1);
        const titles = values.map((value) => (this.pairs.groups.length > 1 ? `${name}: ${value}` : value));
        const shares = values.map((value) => [first, second].map((model) => model.accuracies[column]?.[value]));
        return values.map((_, i) => line(titles[i], agreements[i], shares[i]));
      });
      const [all] = this.agreements(a, b, new Uint8Array(this.pairs.count), 1);
      const heads = ["pairs", "accuracy of A", "accuracy of B", "only A right", "only B right", "both right", "neither"];
      const caption = make("caption", {}, `A is ${first.label}, B is ${second.label}. In brackets are 95% intervals.`);
      const body = make("tbody", {}, line("all", all, [first.accuracy, second.accuracy]), ...lines);
      return make("table", {}, caption, this.head(heads), body);
    });
    panel.replaceChildren(table);
  }

  /** Return for each of `size` codes how many pairs A alone, B alone, both and neither rank right, where both scored. */
  agreements(a, b, codes, size) {
    const { pairs } = this;
    const [ofA, ofB] = [pairs.verdicts(a), pairs.verdicts(b)];
    const [first, second] = [pairs.margins(a), pairs.margins(b)];
    const counts = Array.from({ length: size }, () => [0, 0, 0, 0]);
    for (let row = 0; row < pairs.count; row++) {
      if (ofA[row] === TIED || Number.isNaN(first[row]) || Number.isNaN(second[row])) continue;
      const [rightA, rightB] = [ofA[row] === RIGHT, ofB[row] === RIGHT];
      counts[codes[row]][rightA === rightB ? (rightA ? 2 : 3) : rightA ? 0 : 1]++;
    }
    return counts;
  }

  share(share) {
    if (!share) return "–";
    const [value, low, high] = share;
    return low === null ? percent(value) : `${percent(value)} (${percent(low)} to ${percent(high)})`;
  }
}

at("copy").hidden = false;
at("copy").addEventListener("click", (event) => {
  getSelection().selectAllChildren(at("path"));
  if (document.execCommand("copy")) event.target.textContent = "Copied"; // else it is selected, to be copied by hand
});
unpack(at("pairs-data").textContent)
  .then((block) => {
    at("explorer").hidden = false;
    at("pairs-wait").hidden = true;
    new Explorer(new Pairs(block));
  })
  .catch((error) => {
    at("pairs-wait").textContent = `This browser cannot show the pairs: ${error}`;
  });
