// Locked memory under a sanitizer. Sanitizers make `mlock` do nothing, for the sake of `mlockall`, under which their
// shadow would be locked as well. Ours locks what it names, and its tests look at what the kernel says of it.

#include <sys/syscall.h>
#include <unistd.h>

int __wrap_mlock(const void *start, size_t length) {
    return (int)syscall(SYS_mlock, start, length);
}

int __wrap_munlock(const void *start, size_t length) {
    return (int)syscall(SYS_munlock, start, length);
}
