// host_memory_limit over made-up /proc and /sys trees.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "../../csrc/host_memory_limit.h"
#include "check.h"

namespace directkv::test {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

// A directory that is a machine's root.
class Root {
 public:
  Root() {
    const char* base = std::getenv("TMPDIR");
    path_ = std::string(base ? base : "/tmp") + "/directkv-limit-XXXXXX";
    if (!mkdtemp(path_.data())) std::abort();
  }
  ~Root() { (void)!std::system(("rm -rf '" + path_ + "'").c_str()); }

  void write(const std::string& file, const std::string& text) {
    for (size_t slash = 1; (slash = file.find('/', slash)) != std::string::npos; ++slash)
      mkdir((path_ + file.substr(0, slash)).c_str(), 0755);
    std::ofstream(path_ + file) << text;
  }
  void machine(int64_t total_gib, int64_t available_gib, bool virtual_machine) {
    write("/proc/meminfo", "MemTotal:       " + std::to_string(total_gib << 20) +
                               " kB\nMemFree: 1 kB\nMemAvailable:   " +
                               std::to_string(available_gib << 20) + " kB\n");
    write("/proc/cpuinfo", std::string("processor\t: 0\nflags\t\t: fpu sse") +
                               (virtual_machine ? " hypervisor lahf_lm\n" : " lahf_lm\n"));
  }
  // Version 2 group; limit in GiB or "max".
  void group(const std::string& path, const std::string& max, int64_t current_gib,
             int64_t inactive_gib = 0) {
    const std::string at = "/sys/fs/cgroup" + path;
    write(at + "/memory.max", max == "max" ? "max\n" : std::to_string(std::stoll(max) * kGiB));
    write(at + "/memory.current", std::to_string(current_gib * kGiB));
    write(at + "/memory.stat", "anon 5\nfile 7\nactive_file 3\ninactive_file " +
                                   std::to_string(inactive_gib * kGiB) + "\n");
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void expect(const Root& root, int64_t available_gib, int64_t limit_gib, const char* source) {
  const MemoryLimit got = host_memory_limit(root.path(), 0, 0);
  CHECK(got.available == available_gib * kGiB && got.limit == limit_gib * kGiB &&
            !std::strcmp(got.source, source),
        "available %g GiB of %g (%s), expected %d of %d (%s)", got.available / double(kGiB),
        got.limit / double(kGiB), got.source, static_cast<int>(available_gib),
        static_cast<int>(limit_gib), source);
}

TEST(limit_without_groups) {
  Root root;
  root.machine(64, 50, false);
  expect(root, 50, 64, "MemTotal");
  root.write("/proc/self/cgroup", "0::/user.slice\n");
  expect(root, 50, 64, "MemTotal");
}

TEST(limit_of_group_v2) {
  Root root;
  root.machine(64, 50, false);
  root.write("/proc/self/cgroup", "1:name=systemd:/\n0::/a/b/c\n");
  root.group("/a/b/c", "max", 3);
  expect(root, 50, 64, "MemTotal");
  root.group("/a", "30", 12);
  expect(root, 18, 30, "cgroup memory.max");
  root.group("/a", "30", 12, 5);  // idle file pages do not count
  expect(root, 23, 30, "cgroup memory.max");
  root.group("/a/b/c", "20", 3);
  expect(root, 17, 20, "cgroup memory.max");
  root.group("/a/b/c", "2", 3);  // already over it
  expect(root, 0, 2, "cgroup memory.max");
  root.group("/a/b/c", "1000", 3);  // more than the machine has
  root.group("/a", "max", 3);
  expect(root, 50, 64, "MemTotal");
}

// In a container the path in /proc may not exist below the mount.
TEST(limit_of_container) {
  Root root;
  root.machine(64, 50, false);
  for (const char* line : {"0::/\n", "0::/docker/0123\n", "0::/../other\n"}) {
    root.write("/proc/self/cgroup", line);
    root.group("", "8", 2);
    expect(root, 6, 8, "cgroup memory.max");
  }
}

TEST(limit_of_group_v1) {
  Root root;
  root.machine(64, 50, false);
  root.write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n");
  root.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  expect(root, 50, 64, "MemTotal");
  root.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", std::to_string(16 * kGiB));
  root.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", std::to_string(6 * kGiB));
  root.write("/sys/fs/cgroup/memory/job/memory.stat",
             "inactive_file 1\ntotal_inactive_file " + std::to_string(kGiB) + "\n");
  expect(root, 11, 16, "cgroup memory.limit_in_bytes");
}

// A virtual machine whose memory grows as it is touched: MemTotal does not bind, a group does.
TEST(limit_of_growing_machine) {
  Root root;
  root.machine(31, 29, true);
  expect(root, 29, 31, "MemTotal");
  CHECK(machine_memory(root.path()).may_grow, "hypervisor flag");
  root.write("/proc/self/cgroup", "0::/\n");
  root.group("", "128", 2);
  expect(root, 126, 128, "cgroup memory.max");
  root.group("", "20", 2);
  expect(root, 18, 20, "cgroup memory.max");
  root.machine(31, 29, false);
  CHECK(!machine_memory(root.path()).may_grow, "bare metal");
  root.group("", "128", 2);
  expect(root, 29, 31, "MemTotal");
  root.write("/sys/bus/virtio/drivers/virtio_mem/virtio3", "");
  CHECK(machine_memory(root.path()).may_grow, "virtio_mem");
}

TEST(limit_overruled) {
  Root root;
  root.machine(64, 50, false);
  MemoryLimit limit = host_memory_limit(root.path(), 10 * kGiB, 3 * kGiB);
  CHECK(limit.available == 7 * kGiB && limit.limit == 10 * kGiB, "%g", limit.available / 1e9);
  CHECK(!std::strcmp(limit.source, kMemoryLimitVariable), "%s", limit.source);
  limit = host_memory_limit(root.path(), 2 * kGiB, 3 * kGiB);
  CHECK(limit.available == 0, "never negative");
  setenv(kMemoryLimitVariable, "1.5", 1);
  CHECK(overruling_limit() == kGiB * 3 / 2, "1.5");
  for (const char* nonsense : {"", "x", "-3", "0", "nan", "inf", "1e300", "5GB"}) {
    setenv(kMemoryLimitVariable, nonsense, 1);
    CHECK(overruling_limit() == 0, "%s", nonsense);
  }
  unsetenv(kMemoryLimitVariable);
}

TEST(limit_without_any_file) {
  Root root;
  const MemoryLimit limit = host_memory_limit(root.path(), 0, 0);
  CHECK(limit.available == INT64_MAX && !std::strcmp(limit.source, "MemTotal"), "unknown");
  const MemoryLimit here = host_memory_limit();
  CHECK(here.available > 0 && here.limit >= here.available, "%s", here.source);
}

}  // namespace
}  // namespace directkv::test
