// Stub of the DSP's loader, around a QNN library: a backend is created only if the DSP of the device would load the
// skel in ADSP_LIBRARY_PATH. It reads two files of a device:
//   /vendor/dsp/cdsp/fastrpc_shell_unsigned_3   its presence: the compute DSP has unsigned process domains
//   /vendor/lib/rfsa/adsp/testsig.so            key with which this device checks signatures
// and runs id -u on the device. The real library does everything else.
//
// tests/skel_stub.py defines STUB_HTP_LIBRARY (the real library), STUB_SKEL (name of the skel) and STUB_DOMAIN (0:
// signed process domain of the audio DSP, for root; 3: unsigned process domain of the compute DSP). A signature is a
// keyed checksum of the loaded segment, not a real signature.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace {
constexpr int kOpenFlags = RTLD_NOW | RTLD_GLOBAL;
}  // namespace

#include "qnn_library_stub.h"

namespace {

constexpr size_t kBackendCreate = 1;
constexpr uint64_t kErrorTransport = 1008;
constexpr uint32_t kLoad = 1, kNull = 0, kHashes = 2 << 24, kKinds = 7 << 24;

struct Elf32Header {
  uint8_t ident[16];
  uint16_t type, machine;
  uint32_t version, entry, table, sections, flags;
  uint16_t size, entry_size, count;
};
struct Segment {  // Elf32_Phdr
  uint32_t type, offset, address, physical, bytes, memory, flags, align;
};

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool exists(const std::string& path) { return std::ifstream(path).good(); }

std::string first_line(const char* command) {
  char line[64] = "";
  FILE* output = popen(command, "r");
  if (output == nullptr) return "";
  if (std::fgets(line, sizeof line, output) == nullptr) line[0] = '\0';
  pclose(output);
  line[std::strcspn(line, "\n")] = '\0';
  return line;
}

// FNV-1a, 64 bits, as in tests/skel_stub.py.
uint64_t checksum(const std::string& text) {
  uint64_t value = 0xcbf29ce484222325;
  for (const unsigned char byte : text) value = (value ^ byte) * 0x100000001b3;
  return value;
}

// Returns true if the segment of hashes in a skel is the checksum of `key` and the loaded segment.
bool is_signed_with(const std::string& skel, const std::string& key) {
  Elf32Header header{};
  if (key.empty() || skel.size() < sizeof header) return false;
  std::memcpy(&header, skel.data(), sizeof header);
  std::string code, signature;
  for (uint32_t i = 0; i < header.count; ++i) {
    Segment one{};
    const size_t place = header.table + size_t{i} * header.entry_size;
    if (place + sizeof one > skel.size()) return false;
    std::memcpy(&one, skel.data() + place, sizeof one);
    if (one.offset > skel.size() || one.bytes > skel.size() - one.offset) return false;
    if (one.type == kLoad) code = skel.substr(one.offset, one.bytes);
    if (one.type == kNull && (one.flags & kKinds) == kHashes) signature = skel.substr(one.offset, one.bytes);
  }
  const uint64_t right = checksum(key + code);
  return signature.size() == sizeof right && std::memcmp(signature.data(), &right, sizeof right) == 0;
}

std::string find_skel() {
  const char* paths = std::getenv("ADSP_LIBRARY_PATH");
  std::istringstream folders(paths == nullptr ? "" : paths);
  for (std::string folder; std::getline(folders, folder, ';');) {
    if (exists(folder + "/" STUB_SKEL)) return folder + "/" STUB_SKEL;
  }
  return "";
}

void log_on_device(const std::string& line) {
  if (std::system(("log -t adsprpc '" + line + "'").c_str()) != 0) std::fprintf(stderr, "skel stub: no log\n");
}

// Lines of QNN's transport for a skel that the DSP does not open, from Qualcomm's page on signed skels.
uint64_t refused() {
  std::fputs(
      "[ERROR] [Qnn ExecuTorch]:  <E> DspTransport.openSession qnn_open failed, 0x80000406, prio 100\n"
      "[ERROR] [Qnn ExecuTorch]:  <E> IDspTransport: Unable to load lib 0x80000406\n"
      "[ERROR] [Qnn ExecuTorch]:  <E> DspTransport failed,cannot open session, error 0x00000009\n"
      "[ERROR] [Qnn ExecuTorch]:  <E> Unable to load Skel Library. transportStatus: 9\n"
      "[ERROR] [Qnn ExecuTorch]:  <E> Failed to retrieve skel build id: err: 1008\n",
      stderr);
  return kErrorTransport;
}

uint64_t load_skel() {
  const char* system = std::getenv("ANDROID_ROOT");
  if (system == nullptr) return 0;  // The process runs on this machine and compiles.
  const std::string android = system;
  const std::string root = android.substr(0, android.rfind("/system"));
  if (STUB_DOMAIN == 3 && !exists(root + "/vendor/dsp/cdsp/fastrpc_shell_unsigned_3")) {
    std::fputs(
        "[ERROR] [Qnn ExecuTorch]:  <E> DspTransport.createUnsignedPD unsigned PD or DSPRPC_GET_DSP_INFO not supported "
        "by HTP\n[ERROR] [Qnn ExecuTorch]:  <E> Unable to load Skel Library. transportStatus: -1\n",
        stderr);
    return kErrorTransport;
  }
  if (STUB_DOMAIN == 0 && first_line("id -u") != "0") {
    log_on_device("untrusted app trying to offload to signed remote process");
    return refused();
  }
  const std::string path = find_skel();
  if (path.empty()) return refused();
  if (STUB_DOMAIN == 0 && !is_signed_with(bytes_of(path), bytes_of(root + "/vendor/lib/rfsa/adsp/testsig.so"))) {
    log_on_device("remote_handle_open_domain: dynamic loading failed (dlerror signature verify start failed for " STUB_SKEL ")");
    return refused();
  }
  std::fputs("skel stub: " STUB_SKEL " loaded\n", stderr);
  return 0;
}

uint64_t backend_create(void* logger, const void** configs, void** backend) {
  const uint64_t error = load_skel();
  if (error != 0) return error;
  return original<decltype(&backend_create)>(kBackendCreate)(logger, configs, backend);
}

void replace_functions(Interface& own) { own.entries[kBackendCreate] = reinterpret_cast<void*>(&backend_create); }

}  // namespace
