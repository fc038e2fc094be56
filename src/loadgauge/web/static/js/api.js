/** The server, which does all the arithmetic. */
const token = document.querySelector('meta[name="loadgauge-token"]').content;

export class Refused extends Error {
  constructor(message, kind) {
    super(message);
    this.kind = kind;
  }
}

/** A question with a body of JSON, or without one. */
export function ask(path, body, signal) {
  if (body === undefined) return fetched(path, { method: "GET", signal });
  return fetched(path, { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

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
  if (!answer.ok) throw new Refused(found.error ?? `${answer.status}`, found.kind ?? "Error");
  return found;
}

/** One request at a time: what is asked meanwhile waits, and only the last of it is sent. */
export function latest(path, done, failed) {
  let busy = false;
  let waiting = null;
  const send = async (body) => {
    busy = true;
    try {
      const found = await ask(path, body);
      if (!waiting) done(found, body);
    } catch (error) {
      if (!waiting) failed(error, body);
    }
    busy = false;
    if (waiting) {
      const next = waiting;
      waiting = null;
      send(next);
    }
  };
  return (body) => {
    if (busy) waiting = body;
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
