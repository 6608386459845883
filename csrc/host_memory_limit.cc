#include "host_memory_limit.h"

#include <dirent.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

namespace directkv {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
std::atomic<int64_t> held_bytes{0};

// The lines of a file; none if it cannot be read. By C's own input: a module that was linked with a
// second copy of the C++ library can crash in the number parsing of its streams.
std::vector<std::string> read_lines(const std::string& path) {
  std::vector<std::string> lines;
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (!file) return lines;
  char* line = nullptr;
  size_t capacity = 0;
  for (ssize_t n; (n = getline(&line, &capacity, file)) >= 0;) {
    lines.emplace_back(line, n > 0 && line[n - 1] == '\n' ? n - 1 : n);
  }
  std::free(line);
  std::fclose(file);
  return lines;
}

// The whole file as one number; "max", a missing file and control group v1's 2^63 are kUnlimited.
int64_t read_number(const std::string& path) {
  const std::vector<std::string> lines = read_lines(path);
  int64_t value;
  if (lines.empty() || std::sscanf(lines[0].c_str(), "%" SCNd64, &value) != 1) return kUnlimited;
  return value >= int64_t{1} << 60 ? kUnlimited : value;
}

// Value of the line that starts with `key` (then white space or a colon); `missing` without it.
int64_t read_field(const std::string& path, const std::string& key, int64_t missing) {
  for (const std::string& line : read_lines(path)) {
    if (line.rfind(key, 0) != 0) continue;
    const char* rest = line.c_str() + key.size();
    int64_t value;
    if (*rest != ':' && *rest != ' ' && *rest != '\t') continue;
    if (std::sscanf(rest + 1, "%" SCNd64, &value) == 1) return value;
  }
  return missing;
}

struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // field of memory.stat
  const char* source;
};
constexpr GroupFiles kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file",
                                  "cgroup memory.max"};
constexpr GroupFiles kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                  "memory.usage_in_bytes", "total_inactive_file",
                                  "cgroup memory.limit_in_bytes"};

// The tightest of this process's group and the groups around it. Inside a container the path that
// /proc names may not exist below the mount: then only those that do are looked at.
MemoryLimit tightest_group(const std::string& root, const GroupFiles& files, std::string path) {
  MemoryLimit tightest = {kUnlimited, kUnlimited, files.source};
  if (path.find("..") != std::string::npos) path.clear();  // outside our namespace
  while (true) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    const std::string group = root + files.mount + path + "/";
    const int64_t limit = read_number(group + files.limit);
    if (limit != kUnlimited) {
      const int64_t used = read_number(group + files.usage);
      // The kernel drops idle file pages before it refuses or kills.
      const int64_t idle = read_field(group + "memory.stat", files.reclaimable, 0);
      const int64_t available =
          used == kUnlimited ? limit
                             : std::max<int64_t>(0, limit - std::max<int64_t>(0, used - idle));
      if (available < tightest.available) tightest = {available, limit, files.source};
    }
    if (path.empty()) return tightest;
    path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

MemoryLimit group_limit(const std::string& root) {
  MemoryLimit found = {kUnlimited, kUnlimited, kVersion2.source};
  for (const std::string& line : read_lines(root + "/proc/self/cgroup")) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    MemoryLimit limit = found;
    if (controllers == ",,") limit = tightest_group(root, kVersion2, line.substr(second + 1));
    if (controllers.find(",memory,") != std::string::npos)
      limit = tightest_group(root, kVersion1, line.substr(second + 1));
    if (limit.available < found.available) found = limit;
  }
  return found;
}

bool has_entries(const std::string& path, const std::string& prefix) {
  DIR* directory = opendir(path.c_str());
  if (!directory) return false;
  bool found = false;
  while (const dirent* entry = readdir(directory))
    found |= std::string(entry->d_name).rfind(prefix, 0) == 0;
  closedir(directory);
  return found;
}

// x86 says so in the processor flags; elsewhere a bound memory driver does.
bool may_grow(const std::string& root) {
  for (const std::string& line : read_lines(root + "/proc/cpuinfo")) {
    if (line.rfind("flags", 0) == 0) {
      if ((line + " ").find(" hypervisor ") != std::string::npos) return true;
      break;
    }
  }
  return has_entries(root + "/sys/bus/virtio/drivers/virtio_mem", "virtio") ||
         has_entries(root + "/sys/bus/virtio/drivers/virtio_balloon", "virtio");
}

}  // namespace

MachineMemory machine_memory(const std::string& root) {
  const std::string path = root + "/proc/meminfo";
  const auto bytes = [&](const char* key) {
    const int64_t kib = read_field(path, key, -1);
    return kib < 0 ? kUnlimited : kib * 1024;
  };
  return {bytes("MemTotal"), bytes("MemAvailable"), may_grow(root)};
}

MemoryLimit host_memory_limit(const std::string& root, int64_t overruling, int64_t held) {
  if (overruling > 0) {
    return {std::max<int64_t>(0, overruling - held), overruling, kMemoryLimitVariable};
  }
  const MachineMemory machine = machine_memory(root);
  const MemoryLimit group = group_limit(root);
  if (group.limit != kUnlimited && machine.may_grow && group.limit > machine.total) return group;
  if (group.available < machine.available) return group;
  return {machine.available, machine.total, kMemTotalSource};
}

MemoryLimit host_memory_limit() {
  return host_memory_limit("", overruling_limit(), pool_bytes_held());
}

int64_t overruling_limit() {
  const char* text = std::getenv(kMemoryLimitVariable);
  if (!text) return 0;
  char* end = nullptr;
  const double gib = std::strtod(text, &end);
  constexpr double kMostGib = 1 << 30;
  if (end == text || *end != '\0' || !(gib > 0.0) || gib > kMostGib) return 0;
  return static_cast<int64_t>(gib * (int64_t{1} << 30));
}

int64_t pool_bytes_held() { return held_bytes; }
void add_pool_bytes(int64_t bytes) { held_bytes += bytes; }

int64_t memory_margin(int64_t limit) { return std::min<int64_t>(int64_t{1} << 30, limit / 16); }

}  // namespace directkv
