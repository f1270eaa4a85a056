/* Numbers what a process does to the files of one folder, and strikes at one of these points.

   Preloaded into a process (LD_PRELOAD); armed by crashpoints_arm, or by the variables
   CRASHPOINTS_FOLDER, CRASHPOINTS_AT and CRASHPOINTS_HOW. A point is an open for writing, a write,
   an fsync, a rename or an unlink of a file in the folder, or in a folder in it; o, w, f, r and u in
   the trace, m for a folder that is made.

   how: 'k' kills the process before the point, 'e' and 'n' let it fail with EIO or ENOSPC, 's' cuts
   a write short and then kills the process, which is before the point where it is no write. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long at, count;
static char how = 'k';
static char trace[1 << 16];  /* a letter for each point */
static char wanted[1 << 16]; /* of a handle: whether it is of a file of the folder */

void crashpoints_arm(const char *path, long point, char kind) {
    count = 0;
    at = point;
    how = kind;
    memset(trace, 0, sizeof trace);
    memset(wanted, 0, sizeof wanted);
    snprintf(folder, sizeof folder, "%s", path);
}

const char *crashpoints_trace(void) { return trace; }

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CRASHPOINTS_FOLDER"), *point = getenv("CRASHPOINTS_AT");
    const char *kind = getenv("CRASHPOINTS_HOW");
    if (path && point && kind) crashpoints_arm(path, atol(point), *kind);
}

static int inside(int base, const char *path) {
    char whole[2 * PATH_MAX], link[64], dir[PATH_MAX];
    size_t length = strlen(folder);
    if (!length || !path) return 0;
    if (path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        if (base == AT_FDCWD) {
            if (!getcwd(dir, sizeof dir)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", base);
            ssize_t n = readlink(link, dir, sizeof dir - 1);
            if (n < 0) return 0;
            dir[n] = 0;
        }
        snprintf(whole, sizeof whole, "%s/%s", dir, path);
    }
    return !strncmp(whole, folder, length) && (whole[length] == '/' || !whole[length]);
}

/* Whether the call is to fail; it does not come back from a kill. */
static int strikes(char letter) {
    if (count + 1 < (long)sizeof trace) trace[count] = letter;
    if (++count != at) return 0;
    if (how == 'k' || how == 's') kill(getpid(), SIGKILL);
    errno = how == 'n' ? ENOSPC : EIO;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int opened(int handle, int writes) {
    if (handle >= 0 && handle < (int)sizeof wanted) wanted[handle] = (char)writes;
    return handle;
}

#define OPEN(name, given, passed, base)                                                            \
    int name given {                                                                               \
        mode_t mode = 0;                                                                           \
        if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                                \
            va_list more;                                                                          \
            va_start(more, flags);                                                                 \
            mode = va_arg(more, mode_t);                                                           \
            va_end(more);                                                                          \
        }                                                                                          \
        int ours = inside(base, path);                                                             \
        int writes = ours && (flags & (O_WRONLY | O_RDWR));                                        \
        if (writes && strikes('o')) return -1;                                                        \
        return opened(NEXT(name) passed, ours);                                                    \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(openat, (int base, const char *path, int flags, ...), (base, path, flags, mode), base)
OPEN(openat64, (int base, const char *path, int flags, ...), (base, path, flags, mode), base)

static int watched(int handle) {
    return handle >= 0 && handle < (int)sizeof wanted && wanted[handle];
}

int close(int handle) {
    opened(handle, 0);
    return NEXT(close)(handle);
}

ssize_t write(int handle, const void *data, size_t size) {
    if (watched(handle)) {
        if (how == 's' && count + 1 == at) NEXT(write)(handle, data, size / 2);
        if (strikes('w')) return -1;
    }
    return NEXT(write)(handle, data, size);
}

ssize_t writev(int handle, const struct iovec *parts, int many) {
    if (watched(handle)) {
        if (how == 's' && count + 1 == at && many) NEXT(write)(handle, parts->iov_base, parts->iov_len / 2);
        if (strikes('w')) return -1;
    }
    return NEXT(writev)(handle, parts, many);
}

ssize_t pwrite64(int handle, const void *data, size_t size, off64_t place) {
    if (watched(handle)) {
        if (how == 's' && count + 1 == at) NEXT(pwrite64)(handle, data, size / 2, place);
        if (strikes('w')) return -1;
    }
    return NEXT(pwrite64)(handle, data, size, place);
}

int ftruncate64(int handle, off64_t size) {
    return watched(handle) && strikes('t') ? -1 : NEXT(ftruncate64)(handle, size);
}

int fsync(int handle) { return watched(handle) && strikes('f') ? -1 : NEXT(fsync)(handle); }

int fdatasync(int handle) { return watched(handle) && strikes('f') ? -1 : NEXT(fdatasync)(handle); }

int rename(const char *from, const char *to) {
    return inside(AT_FDCWD, to) && strikes('r') ? -1 : NEXT(rename)(from, to);
}

int renameat(int old, const char *from, int base, const char *to) {
    return inside(base, to) && strikes('r') ? -1 : NEXT(renameat)(old, from, base, to);
}

int unlink(const char *path) {
    return inside(AT_FDCWD, path) && strikes('u') ? -1 : NEXT(unlink)(path);
}

int unlinkat(int base, const char *path, int flags) {
    return inside(base, path) && strikes('u') ? -1 : NEXT(unlinkat)(base, path, flags);
}

int mkdir(const char *path, mode_t mode) {
    return inside(AT_FDCWD, path) && strikes('m') ? -1 : NEXT(mkdir)(path, mode);
}
