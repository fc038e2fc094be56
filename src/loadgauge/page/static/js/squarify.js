/** Places rectangles with areas like their values, as square as can be (Bruls, Huizing, van Wijk 2000). */
export function squarify(values, { x, y, width, height }) {
  const total = values.reduce((sum, value) => sum + value, 0);
  if (!total || width <= 0 || height <= 0) return values.map(() => ({ x, y, width: 0, height: 0 }));
  const scale = (width * height) / total;
  const order = values.map((_, place) => place).sort((a, b) => values[b] - values[a]);
  const boxes = new Array(values.length);
  let row = [];
  const area = (place) => values[place] * scale;
  const worst = (places, side) => {
    const sum = places.reduce((all, place) => all + area(place), 0);
    return Math.max(...places.map((place) => Math.max((side * side * area(place)) / (sum * sum), (sum * sum) / (side * side * Math.max(area(place), 1e-9)))));
  };
  const put = (places) => {
    const sum = places.reduce((all, place) => all + area(place), 0);
    const upright = width >= height;
    const depth = sum / (upright ? height : width);
    let at = upright ? y : x;
    for (const place of places) {
      const long = depth ? area(place) / depth : 0;
      boxes[place] = upright ? { x, y: at, width: depth, height: long } : { x: at, y, width: long, height: depth };
      at += long;
    }
    if (upright) { x += depth; width -= depth; } else { y += depth; height -= depth; }
  };
  for (const place of order) {
    const side = Math.min(width, height);
    if (row.length && worst([...row, place], side) > worst(row, side)) {
      put(row);
      row = [];
    }
    row.push(place);
  }
  if (row.length) put(row);
  return boxes;
}
