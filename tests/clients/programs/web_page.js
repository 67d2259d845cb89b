// Pages of two origins: jsdom's XMLHttpRequest sends preflights, and hides responses that a page may not read.
//
//     node web_page.js JSDOM URL KEY
//
// Prints the beginning of a stream, then three responses; status 0 is a response that the page could not read.

const [library, url, key] = process.argv.slice(2);
const { JSDOM, VirtualConsole } = require(library);
const allowed = "https://app.example:8443/page", foreign = "https://evil.example/";
const chat = { model: "fake", messages: [{ role: "user", content: "Hi" }], stream: true, unknown_field: 1 };

function send(origin, path, token, body, progress) {
  const request = new new JSDOM("", { url: origin, virtualConsole: new VirtualConsole() }).window.XMLHttpRequest();
  request.open(body ? "POST" : "GET", url + path);
  request.setRequestHeader("Authorization", `Bearer ${token}`);
  if (body) request.setRequestHeader("Content-Type", "application/json");
  request.onprogress = () => progress?.(request.responseText);
  request.send(body && JSON.stringify(body));
  return new Promise((resolve) => {
    request.onloadend = () => {
      const headers = ["x-request-id", "warning"].map((name) => request.getResponseHeader(name));
      resolve({ status: request.status, text: request.responseText, headers });
    };
  });
}

(async () => {
  let beginning = "";
  const streamed = await send(allowed, "/v1/chat/completions", key, chat, (text) => {
    if (beginning || !text.includes("Hello")) return;
    beginning = text;
    send(allowed, "/v1/models", key); // the server holds back the rest of the stream until then
  });
  const unauthorized = await send(allowed, "/v1/models", "wrong");
  const refused = await send(foreign, "/v1/chat/completions", key, chat);
  console.log(JSON.stringify([beginning, streamed, unauthorized, refused]));
})();
