// For pages that are read from files: a browser starts no worker there, so the script of the search runs in a hidden
// frame of the page. Nothing is loaded from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.frame = frame.contentWindow
      this.frame.document.open()
      this.frame.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise(resolve => { this.frame.onload = resolve })
      this.frame.document.write(`<script src="${url}"></script>`)
      this.frame.document.close()
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })))
    }
  }
}
