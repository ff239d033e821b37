// What @yume-chan/adb does with a device, as one line of JSON: `yume_adb.mjs SETTINGS`.
//
// `way` is `daemon`, where its own implementation of adb's transport protocol speaks to the device, or `server`.
import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { Socket } from "node:net";
import { Readable } from "node:stream";

import {
  Adb,
  AdbDaemonTransport,
  AdbPacket,
  AdbPacketSerializeStream,
  AdbServerClient,
  LinuxFileType,
} from "@yume-chan/adb";
import { AdbServerNodeTcpConnector } from "@yume-chan/adb-server-node-tcp";
import { Consumable, PushReadableStream, StructDeserializeStream, pipeFrom } from "@yume-chan/stream-extra";

const settings = JSON.parse(process.argv[2]);
const seen = {};

const error = (work) => work.then(() => "", (reason) => `${reason.name}: ${reason.message}`);
const text = (bytes) => Buffer.from(bytes).toString();

async function all(readable) {
  const pieces = [];
  for await (const piece of readable) pieces.push(piece);
  return Buffer.concat(pieces);
}

async function connectDaemon() {
  const socket = new Socket();
  socket.setNoDelay(true);
  await new Promise((resolve, reject) => {
    socket.once("error", reject);
    socket.connect(settings.port, "127.0.0.1", resolve);
  });
  const bytes = new PushReadableStream((controller) => {
    socket.on("data", async (data) => {
      socket.pause();
      await controller.enqueue(data);
      socket.resume();
    });
    socket.on("close", () => {
      try {
        controller.close();
      } catch {
        // It was closed from the other side.
      }
    });
  });
  const sink = new Consumable.WritableStream({
    write: (data) => new Promise((resolve, reject) => socket.write(data, (why) => (why ? reject(why) : resolve()))),
    close: () => socket.end(),
  });
  const transport = await AdbDaemonTransport.authenticate({
    serial: "direct",
    connection: {
      readable: bytes.pipeThrough(new StructDeserializeStream(AdbPacket)),
      writable: pipeFrom(sink, new AdbPacketSerializeStream()),
    },
    // The device asks for no key.
    credentialStore: { generateKey: () => Promise.reject(new Error("no key")), iterateKeys: () => [] },
  });
  return new Adb(transport);
}

async function connectServer() {
  const connector = new AdbServerNodeTcpConnector({ host: "127.0.0.1", port: settings.server });
  return await new AdbServerClient(connector).createAdb({ serial: settings.serial });
}

async function converse(readable, writable, message) {
  const writer = writable.getWriter();
  await writer.write(message);
  const reader = readable.getReader();
  let answer = Buffer.alloc(0);
  while (answer.length < message.length) {
    const { done, value } = await reader.read();
    if (done) break;
    answer = Buffer.concat([answer, value]);
  }
  writer.releaseLock();
  reader.releaseLock();
  return answer.equals(message);
}

function converseTcp(port, message) {
  return new Promise((resolve, reject) => {
    let answer = Buffer.alloc(0);
    const socket = new Socket();
    socket.once("error", reject);
    socket.on("data", (data) => {
      answer = Buffer.concat([answer, data]);
      if (answer.length >= message.length) {
        socket.destroy();
        resolve(answer.equals(message));
      }
    });
    socket.once("close", () => resolve(false));
    socket.connect(port, "127.0.0.1", () => socket.write(message));
  });
}

const adb = settings.way === "daemon" ? await connectDaemon() : await connectServer();
seen.product = adb.banner.product;
seen.model = await adb.getProp("ro.soc.model");

const done = await adb.subprocess.shellProtocol.spawnWait("echo out; echo err >&2; exit 42");
seen.shell = [done.exitCode, text(done.stdout), text(done.stderr)];
seen.plain = await adb.subprocess.noneProtocol.spawnWaitText("echo out; echo err >&2");
seen.much = (await adb.subprocess.shellProtocol.spawnWait("head -c 3000000 /dev/zero")).stdout.length;
seen.logcat = await adb.subprocess.noneProtocol.spawnWaitText("logcat -d");

const sync = await adb.sync();
await sync.write({
  filename: settings.remote,
  file: Readable.toWeb(createReadStream(settings.file)),
  type: LinuxFileType.File,
  permission: 0o644,
  mtime: 1700000000,
});
const found = await sync.stat(settings.remote);
seen.stat = [Number(found.size), Number(found.mtime), found.type === LinuxFileType.File];
seen.names = (await sync.readdir("/data/local/tmp")).map((entry) => entry.name);
seen.pulled = createHash("sha256").update(await all(sync.read(settings.remote))).digest("hex");
seen.missing = await error(all(sync.read("/data/local/tmp/none")));
await sync.dispose();

const message = Buffer.alloc(1_000_000, "message");
const forward = await adb.createSocket(`tcp:${settings.echo}`);
seen.forward = await converse(forward.readable, forward.writable, message);
await forward.close();
// The end of such a stream: nobody listens there.
seen.nobody = await error(adb.createSocket("tcp:1").then((socket) => all(socket.readable)));
seen.refused = await error(adb.createSocket("jdwp:1"));

const address = await adb.reverse.add("tcp:0", (socket) => {
  // The device hears that it is open once this returns.
  socket.readable.pipeTo(socket.writable).catch(() => {});
});
seen.listed = (await adb.reverse.list()).map((one) => one.localName).includes(address);
seen.reverse = await converseTcp(Number(address.split(":")[1]), message);
await adb.reverse.remove(address);
seen.left = (await adb.reverse.list()).length;
seen.unknownReverse = await error(adb.reverse.remove("tcp:1"));

seen.remount = await adb.createSocketAndWait("remount:");
seen.bootloader = await error(adb.power.bootloader());
await adb.power.reboot();
seen.cut = await Promise.race([
  adb.disconnected.then(() => true),
  new Promise((resolve) => setTimeout(resolve, 20_000, false)),
]);
console.log(JSON.stringify(seen));
process.exit(0);
