/* Search in a site that is opened from a folder: browsers start no worker there, so that its script runs in a frame instead. */
if (location.protocol === "file:") window.Worker = window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const inner = frame.contentWindow;
    const load = (address) => new Promise((done, failed) => {
      const script = inner.document.createElement("script");
      Object.assign(script, { src: new URL(address, document.baseURI), onload: done, onerror: failed });
      inner.document.body.append(script);
    });
    inner.importScripts = (...addresses) => addresses.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
    inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const ready = load(url);
    this.postMessage = (data) => ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
  }

  set onmessage(listener) { this.addEventListener("message", listener); }

  terminate() {}
};
