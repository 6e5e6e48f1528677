// What a reader of the page would stumble over, as lists of texts; empty where all is well.
() => {
  const seen = element => {
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    return box.width > 1 && box.height > 1 && style.visibility !== "hidden" && element.checkVisibility();
  };
  const parse = text => { const n = text.match(/[\d.]+/g).map(Number); return { rgb: n.slice(0, 3), alpha: n.length > 3 ? n[3] : 1 }; };
  const light = rgb => rgb.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, place) => sum + v * [0.2126, 0.7152, 0.0722][place], 0);
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const paper = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.alpha === 1) return colour.rgb;
    }
    return [255, 255, 255];
  };
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || ["STYLE", "title", "desc"].includes(parent.tagName) || !seen(parent)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    texts.push({ node, parent, box: range.getBoundingClientRect(), svg: parent.closest("svg") });
  }
  const width = document.documentElement.clientWidth;
  const faint = [], cut = [], small = [];
  for (const { node, parent, box, svg } of texts) {
    const style = getComputedStyle(parent), said = node.data.trim().slice(0, 40);
    let behind = paper(svg || parent), colour = parse(style.color).rgb;
    if (svg) {
      colour = parse(style.fill).rgb;
      const x = box.x + box.width / 2, y = box.y + box.height / 2;
      for (const shape of svg.querySelectorAll("path")) {
        const fill = getComputedStyle(shape).fill, area = shape.getBoundingClientRect();
        if (fill === "none" || shape.closest("defs") || parse(fill).alpha < 1) continue;
        if (x > area.left && x < area.right && y > area.top && y < area.bottom) behind = parse(fill).rgb;
      }
      const frame = svg.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        cut.push(`${said} leaves its figure`);
      const scale = frame.width / svg.viewBox.baseVal.width;
      if (scale * parseFloat(style.fontSize) < 7.5) small.push(said);
    } else if (parseFloat(style.fontSize) < 12.5) small.push(said);
    if (ratio(colour, behind) < 4.5) faint.push(`${said}: ${ratio(colour, behind).toFixed(2)}`);
    if (!parent.closest(".scroll") && (box.left < -0.5 || box.right > width + 0.5)) cut.push(said);
  }
  for (const element of document.querySelectorAll("body *"))
    if (["hidden", "clip"].includes(getComputedStyle(element).overflowX) && element.scrollWidth > element.clientWidth + 1
        && seen(element) && !element.closest("svg")) cut.push(`inside ${element.className}`);
  const scrolled = [...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.ariaLabel);
  const levels = [...document.querySelectorAll("h1, h2, h3")].map(h => Number(h.tagName[1]));
  const bottom = name => { const found = [...document.querySelectorAll(name)]; return found.length ? Math.max(...found.map(e => e.getBoundingClientRect().bottom)) : null; };
  return {
    overflow: document.documentElement.scrollWidth - width, faint, cut, small, scrolled,
    levels: levels[0] !== 1 || levels.some((level, place) => place && (level === 1 || level > levels[place - 1] + 1)) ? levels : [],
    figures: document.querySelectorAll("svg").length,
    bottoms: { sentence: bottom(".verdict p"), answers: bottom(".first .answers"), figure: bottom(".first svg"), actions: bottom(".first .todo") },
  };
}
