/** The server, which does all the arithmetic. */
const token = document.querySelector('meta[name="loadgauge-token"]').content;

const PATIENCE = 400;
const waiting = new Map();
let teller = () => {};

/** Calls back with how far a capture is that questions wait for; with null when none does any more. */
export const onCapture = (callback) => { teller = callback; };

const tell = () => teller([...waiting.values()].at(-1) ?? null);

export class Refused extends Error {
  constructor(message, kind, closed) {
    super(message);
    this.kind = kind;
    this.closed = closed;
  }
}

/** A question with a body of JSON, or without one. While a model is captured for it, it is asked again, unless it is outdated(). */
export async function ask(path, body, signal, outdated = () => false) {
  const how = body === undefined ? { method: "GET" } : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const me = Symbol(path);
  try {
    for (;;) {
      const found = await fetched(path, { ...how, signal });
      if (!found.capturing) return found;
      waiting.set(me, found.capturing);
      tell();
      await new Promise((done) => setTimeout(done, PATIENCE));
      if (outdated()) throw new Refused("", "Replaced");
    }
  } finally {
    if (waiting.delete(me)) tell();
  }
}

/** A file of words, by its name. */
export const message = async (name) => (await fetch(`/static/messages/${name}.json`)).json();

/** A file as it is. */
export const send = (path, file) => fetched(path, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file });

async function fetched(path, how) {
  let answer;
  try {
    answer = await fetch(`/api/${path}`, { ...how, headers: { "X-Loadgauge-Token": token, ...how.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("", "Unreachable");
  }
  let found;
  try {
    found = await answer.json();
  } catch {
    throw new Refused(`${answer.status} ${answer.statusText}`, "Server");
  }
  if (!answer.ok) throw new Refused(found.error ?? `${answer.status}`, found.kind ?? "Error", found.closed);
  return found;
}

/** One request at a time: what is asked meanwhile waits, and only the last of it is sent. */
export function latest(path, done, failed) {
  let busy = false;
  let next = null;
  const send = async (body) => {
    busy = true;
    try {
      const found = await ask(path, body, undefined, () => next !== null);
      if (!next) done(found, body);
    } catch (error) {
      if (!next) failed(error, body);
    }
    busy = false;
    if (next) {
      const last = next;
      next = null;
      send(last);
    }
  };
  return (body) => {
    if (busy) next = body;
    else send(body);
  };
}

/** For what takes seconds: waits until nothing has changed for a while; what is under way is given up. */
export function later(path, delay, started, done, failed) {
  let timer = 0;
  let control = null;
  const stop = () => {
    clearTimeout(timer);
    control?.abort();
    control = null;
  };
  const start = (body, wait = delay) => {
    stop();
    timer = setTimeout(async () => {
      const mine = (control = new AbortController());
      started();
      try {
        const found = await ask(path, body, mine.signal);
        if (control === mine) done(found, body);
      } catch (error) {
        if (error.name !== "AbortError" && control === mine) failed(error, body);
      }
      if (control === mine) control = null;
    }, wait);
  };
  return { start, stop };
}
