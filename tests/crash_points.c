/* Kills this process before its n-th change of files below a directory: see stories/test_crash_points.py.

   The library is loaded with LD_PRELOAD. It counts nothing until crash_arm(directory, n) is called.
   With n = 0 it counts, but does not kill.
   Changes are writes, truncations, locks and unlocks, syncs, and names that are made, changed or removed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static char under[PATH_MAX];
static size_t under_length;
static long last;
static atomic_long counted;

void crash_arm(const char *directory, long n) {
    under_length = 0;
    snprintf(under, sizeof under, "%s", directory);
    counted = 0;
    last = n;
    under_length = strlen(under);
}

long crash_counted(void) { return counted; }

static void count_change(void) {
    if (++counted == last) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
}

static void change_by_path(const char *path) {
    char link[64], base[PATH_MAX];
    if (!under_length) return;
    if (!strncmp(path, "/proc/self/fd/", 14)) {  /* a path through the descriptor of its directory */
        const char *rest = strchr(path + 14, '/');
        snprintf(link, sizeof link, "%.*s", rest ? (int)(rest - path) : 60, path);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return;
        base[length] = 0;
        path = base;
    }
    if (!strncmp(path, under, under_length)) count_change();
}

static void change_by_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!under_length) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (!strncmp(path, under, under_length)) count_change();
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define BY_FD(type, name, parameters, arguments) \
    type name parameters { change_by_fd(fd); return REAL(name) arguments; }
#define BY_PATH(type, name, parameters, arguments) \
    type name parameters { change_by_path(path); return REAL(name) arguments; }

BY_FD(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
BY_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
BY_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
BY_FD(int, ftruncate, (int fd, off_t size), (fd, size))
BY_FD(int, ftruncate64, (int fd, off64_t size), (fd, size))
BY_FD(int, fsync, (int fd), (fd))
BY_FD(int, fdatasync, (int fd), (fd))
BY_FD(int, flock, (int fd, int how), (fd, how))
BY_FD(int, fchmod, (int fd, mode_t mode), (fd, mode))
BY_PATH(int, unlink, (const char *path), (path))
BY_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode))
BY_PATH(int, rmdir, (const char *path), (path))
BY_PATH(int, chmod, (const char *path, mode_t mode), (path, mode))
BY_PATH(int, rename, (const char *path, const char *to), (path, to))
BY_PATH(int, link, (const char *path, const char *to), (path, to))

int symlink(const char *what, const char *path) { change_by_path(path); return REAL(symlink)(what, path); }
int linkat(int from, const char *path, int to, const char *name, int flags) {
    change_by_path(path);
    return REAL(linkat)(from, path, to, name, flags);
}
int bind(int fd, const struct sockaddr *address, socklen_t length) {
    change_by_path(((const char *)address) + sizeof(sa_family_t));
    return REAL(bind)(fd, address, length);
}

static int is_change(int what) {
    return what == F_SETLK || what == F_SETLKW || what == F_OFD_SETLK || what == F_OFD_SETLKW;
}
int fcntl(int fd, int what, ...) {
    va_list rest;
    va_start(rest, what);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (is_change(what)) change_by_fd(fd);
    return REAL(fcntl)(fd, what, argument);
}
int fcntl64(int fd, int what, ...) {
    va_list rest;
    va_start(rest, what);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (is_change(what)) change_by_fd(fd);
    return REAL(fcntl64)(fd, what, argument);
}

static int count_if_created(const char *path, int flags) { if (flags & (O_CREAT | O_TRUNC)) change_by_path(path); return flags; }
#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        return REAL(name)(path, count_if_created(path, flags), mode); \
    }
OPENS(open)
OPENS(open64)
