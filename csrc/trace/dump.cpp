// A dump: a copy of the trace's memory (memory.hpp), with the moment and the reason. It is made
// without Python, because another thread may hold the interpreter, or hang in it.
// fastcoll.trace.flight_recorder has it in the format of torch's analyser.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>

#include "base/error.hpp"
#include "trace/recorder.hpp"

namespace fastcoll::trace {

std::string dump(const std::string& reason) {
  Recorder* const all = recorder();
  if (all == nullptr) return "";
  const std::lock_guard<std::mutex> lock(all->mutex);  // no group or error comes meanwhile
  Memory& memory = all->ring.memory();
  std::string head(Header::kBytes, '\0');
  std::memcpy(head.data(), &memory.header(), sizeof(Header));
  auto& header = *reinterpret_cast<Header*>(head.data());
  header.dumpTicks = all->ticks.now();
  header.dumpNanos = steadyNanos();
  header.dumpWall = nanosOf(std::chrono::system_clock::now());
  std::strncpy(header.reason, reason.c_str(), sizeof header.reason - 1);
  std::string rest = all->ring.copy();
  rest.resize(header.texts - Header::kBytes);
  return head + rest + std::string(memory.texts());
}

std::string write(const std::string& reason, std::string path) {
  Recorder* const all = recorder();
  if (all == nullptr) {
    throw Error(ErrorKind::Value,
                "fastcoll.trace: nothing is recorded. Make a group first, and leave "
                "FASTCOLL_TRACE_SIZE above 0.");
  }
  // One lock for the copy and the file: no dump may replace a later one.
  const std::lock_guard<std::mutex> lock(all->fileMutex);
  const std::string bytes = dump(reason);
  if (path.empty()) path = concat(all->dumpPrefix, all->rank());
  // A reader during the write finds the former file or the new one. The temporary name begins with
  // a dot, so a reader of all files with the prefix skips it.
  const std::size_t slash = path.rfind('/') + 1;
  const std::string part =
      concat(path.substr(0, slash), ".", path.substr(slash), ".part", ::getpid());
  // In a folder that other users may write to, do not follow their link under this name.
  ::unlink(part.c_str());
  const int fd = ::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  std::FILE* const file = fd < 0 ? nullptr : ::fdopen(fd, "wb");
  bool worked = file != nullptr;
  if (worked) {
    worked = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
    worked = std::fclose(file) == 0 && worked;
    worked = worked && std::rename(part.c_str(), path.c_str()) == 0;
  }
  if (!worked) {
    const std::string why = std::strerror(errno);
    if (file == nullptr && fd >= 0) ::close(fd);
    if (fd >= 0) ::unlink(part.c_str());
    throw Error(ErrorKind::Value, "fastcoll.trace: ", path, " cannot be written: ", why,
                ". Name a prefix in a folder that exists.");
  }
  return path;
}

}  // namespace fastcoll::trace
