// Rows of a table are sorted by a click on a column, and filtered by words, if the browser runs scripts.
for (const table of document.querySelectorAll(".wide table")) {
  const body = table.tBodies[0], rows = [...body.rows];
  if (rows.length < 3) continue;
  const value = (row, place) => {
    const text = row.cells[place].textContent.trim(), number = Number(text.replaceAll(",", "").replace(/%$/, ""));
    return text !== "" && !Number.isNaN(number) ? number : text;
  };
  const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  for (const [place, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.onclick = () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      head.ariaSort = sign > 0 ? "ascending" : "descending";
      body.append(...rows.sort((a, b) => sign * order(value(a, place), value(b, place))));
    };
  }
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "rows with all of these words";
  field.ariaLabel = `Filter: ${table.caption.textContent}`;
  field.oninput = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  };
  table.closest(".wide").prepend(field);
}
