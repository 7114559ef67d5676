// Requests to the server, for every page.
export async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The server cannot be reached.");
  }
  if (answer.status === 204) return null;
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error ?? `The server answered ${answer.status}.`);
  return body;
}
export const query = (path, fields) => `${path}?${new URLSearchParams(fields)}`;
export const posted = (value) => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) });

// Prepares files for upload: an array and its labels are sent one after the other.
export function paired(files) {
  const pairs = files.filter((file) => !/\.labels\.npy$/i.test(file.name)).map((file) => {
    const labels = files.find((other) => other.name.toLowerCase() === file.name.toLowerCase().replace(/\.npy$/, ".labels.npy"));
    const isArray = /\.npy$/i.test(file.name);
    return { name: file.name, body: isArray && labels ? new Blob([file, labels]) : file };
  });
  if (!pairs.length) throw new Error("These are labels only: choose x.npy and x.labels.npy together.");
  return pairs;
}
