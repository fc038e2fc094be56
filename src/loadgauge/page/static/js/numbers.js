/** Numbers as people read them. Nothing is computed here but the change of unit. */
import { h } from "./dom.js";
import { locale, t } from "./i18n.js";

export const GIB = 2 ** 30;
const formats = new Map();

export function fixed(value, digits = 0) {
  const key = `${locale()}${digits}`;
  if (!formats.has(key)) {
    formats.set(key, new Intl.NumberFormat(locale(), { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return formats.get(key).format(value);
}

/** To so many significant digits, without an exponent. */
export function significant(value, digits = 3) {
  if (!value) return "0";
  const whole = Math.floor(Math.log10(Math.abs(value))) + 1;
  if (whole < -3) return value.toExponential(digits - 1);
  return fixed(value, Math.max(0, Math.min(6, digits - whole)));
}

export const gib = (bytes, digits = 1) => fixed(bytes / GIB, digits);

export function bytes(value) {
  if (Math.abs(value) >= GIB / 10) return `${significant(value / GIB)} GiB`;
  if (Math.abs(value) >= 2 ** 20 / 10) return `${significant(value / 2 ** 20)} MiB`;
  return Math.abs(value) >= 1024 ? `${significant(value / 1024)} KiB` : `${fixed(value)} B`;
}

const SCALE = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function scaled(value, unit = "", digits = 3) {
  for (const [size, letter] of SCALE) if (Math.abs(value) >= size) return `${significant(value / size, digits)} ${letter}${unit}`;
  return `${significant(value, digits)} ${unit}`.trim();
}

/** Counts of parameters and of money: 70.6 B is clearer there than 70.6 G. */
export function counted(value, digits = 3) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= (letter === "k" ? 1e4 : size)) return `${significant(value / (letter === "k" ? 1e3 : size), digits)} ${letter}`;
  }
  return fixed(value);
}

/** A number with its unit, as explanations have it: seconds, bytes, FLOPs, shares, counts, money. */
export function amount(value, unit) {
  if (unit === "s") return seconds(value);
  if (unit === "B") return bytes(value);
  if (unit === "share") return percent(value);
  if (unit === "money") return money(value).join(" ").trim();
  if (unit === "kWh") return scaled(1000 * value, "Wh", 4);
  if (unit === "days") return t("unit.days", { value: significant(value) });
  if (unit === "hours") return `${counted(value)} ${t("unit.hours")}`;
  if (unit === "tokens") return t("unit.tokens", { value: counted(value, 4) });
  if (unit === "tokens/s") return t("unit.rate", { value: fixed(value) });
  if (unit === "count" || !unit) return Number.isInteger(value) ? fixed(value) : significant(value, 5);
  return scaled(value, unit, 4);
}

/** Money: thousands and millions, to the cent only where it is small. */
export function money(value) {
  if (value >= 1e6) return [significant(value / 1e6), "M"];
  if (value >= 1e4) return [significant(value / 1e3), "k"];
  return [fixed(value, value < 100 ? 2 : 0), ""];
}

export function seconds(value) {
  const [number, unit] = duration(value);
  return `${number} ${unit}`;
}

export function duration(value) {
  const size = Math.abs(value);
  if (size >= 3600) return [significant(value / 3600), t("unit.hours")];
  if (size >= 1 || size === 0) return [significant(value), "s"];
  if (size >= 1e-3) return [significant(value * 1e3), "ms"];
  return [significant(value * 1e6), "µs"];
}

export const percent = (share, digits = 1) => `${fixed(100 * share, digits)}%`;

export const signed = (text, value) => (value > 0 ? `+${text}` : value < 0 ? `−${text.replace(/^[-−]/, "")}` : text);

/** A number with its exact value beside it, for the pointer and for tests. */
export function exact(text, value, unit = "") {
  return h("span", { "data-value": value, title: `${value} ${unit}`.trim() }, text);
}
