// What @devicefarmer/adbkit does with a device through an adb server, as one line of JSON: `adbkit.mjs SETTINGS`.
import { createHash } from "node:crypto";
import { Socket } from "node:net";

import adbkit from "@devicefarmer/adbkit";

const settings = JSON.parse(process.argv[2]);
const seen = {};

const error = (work) => work.then(() => "", (reason) => `${reason.name}: ${reason.message}`);
const finished = (transfer) =>
  new Promise((resolve, reject) => {
    transfer.on("end", resolve);
    transfer.on("error", reject);
  });

function converse(socket, message) {
  return new Promise((resolve, reject) => {
    let answer = Buffer.alloc(0);
    socket.once("error", reject);
    socket.on("data", (data) => {
      answer = Buffer.concat([answer, data]);
      if (answer.length >= message.length) {
        socket.destroy();
        resolve(answer.equals(message));
      }
    });
    socket.once("close", () => resolve(false));
    socket.write(message);
  });
}

function connected(path) {
  return new Promise((resolve, reject) => {
    const socket = new Socket();
    socket.once("error", reject);
    socket.connect(path, () => resolve(socket));
  });
}

const client = adbkit.Adb.createClient({ host: "127.0.0.1", port: settings.server });
const device = client.getDevice(settings.serial);
const read = async (command) => (await adbkit.Adb.util.readAll(await device.shell(command))).toString();

seen.devices = (await client.listDevices()).map(({ id, type }) => [id, type]);
seen.model = (await device.getProperties())["ro.soc.model"];
seen.shell = await read("echo out; echo err >&2");
seen.much = (await adbkit.Adb.util.readAll(await device.shell("head -c 3000000 /dev/zero"))).length;

await finished(await device.push(settings.file, settings.remote));
seen.size = (await device.stat(settings.remote)).size;
seen.names = (await device.readdir("/data/local/tmp")).map((entry) => entry.name);
const hash = createHash("sha256");
const pull = await device.pull(settings.remote);
pull.on("data", (data) => hash.update(data));
await finished(pull);
seen.pulled = hash.digest("hex");
seen.missing = await error(device.pull("/data/local/tmp/none").then(finished));

const message = Buffer.alloc(1_000_000, "message");
seen.tcp = await converse(await device.openTcp(settings.echo), message);
const remote = `tcp:${settings.echo}`;
await device.forward(settings.local, remote);
seen.forwards = (await device.listForwards()).map((one) => [one.local, one.remote]);
seen.forward = await converse(await connected(settings.local.split(":")[1]), message);
await device.reverse("localabstract:adbkit", remote);
seen.reverses = (await device.listReverses()).map((one) => [one.remote, one.local]);
seen.reverse = await converse(await device.openLocal("localabstract:adbkit"), message);
seen.nobody = await error(device.openTcp(1).then((socket) => converse(socket, message)));

await read("log -t adbkit -p w words");
const logcat = await device.openLogcat();
seen.log = await new Promise((resolve) => {
  logcat.on("entry", (entry) => entry.tag === "adbkit" && resolve([entry.message, entry.priority, entry.pid > 0]));
});
logcat.end();

seen.root = await device.root();
// The server may not have noticed yet that the device starts anew.
do {
  await device.waitForDevice();
  seen.user = (await read("id -u").catch(() => "")).trim();
} while (seen.user !== "0");
seen.usb = await error(device.usb());
await device.reboot();
console.log(JSON.stringify(seen));
process.exit(0);
