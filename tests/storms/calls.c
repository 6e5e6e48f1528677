// Counts libc's file calls below one folder, and makes one of them fail, or makes it the last one of the process.
//
// Python, Orbax and TensorStore all write through libc, so preloading this library covers them. `arm` chooses the
// folder and the call; a call is below the folder if its path or its descriptor is.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, CREATE, LIST, READ, WRITE, FSYNC, FTRUNCATE, CHMOD, CLOSE, RENAME, LINK, UNLINK, MKDIR, RMDIR, KINDS };
enum { FAIL, KILL, TORN };  // TORN: half of the bytes are written before the process ends
#define FILES 65536
#define CALLS 65536

static char folder[4096];
static size_t length;
static atomic_char below[FILES];  // descriptors of files and folders below the folder
static atomic_long seen;
static long target;
static int mode, numbers[KINDS];
static atomic_int struck;
static unsigned char made[CALLS];

// Chooses the call number `nth` (0: none), and the error number of each kind of call (0: the call succeeds).
void calls_arm(const char *path, long nth, int how, const int *errors) {
  length = 0;
  memset((void *)below, 0, sizeof below);
  snprintf(folder, sizeof folder, "%s", path);
  target = nth, mode = how;
  memcpy(numbers, errors, sizeof numbers);
  atomic_store(&seen, 0);
  atomic_store(&struck, -1);
  length = strlen(folder);
}

// Returns the kind of the call that was struck, or -1.
int calls_struck(void) { return atomic_load(&struck); }

// Ends the counting, and returns the number of calls; their kinds are in `kinds`.
long calls_disarm(unsigned char *kinds) {
  length = 0;
  long count = atomic_load(&seen);
  memcpy(kinds, made, count < CALLS ? count : CALLS);
  return count;
}

static int is_below(int file) { return length && file >= 0 && file < FILES && atomic_load(&below[file]); }

static int at(int base, const char *path) {
  if (!length || !path) return 0;
  if (path[0] == '/') return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
  return is_below(base);
}

// Counts a call; returns whether to strike it: it is the chosen one or, if that cannot fail in this way, the next that
// can. Threads make their calls in any order.
static int chosen(int kind) {
  long number = atomic_fetch_add(&seen, 1);
  if (number < CALLS) made[number] = kind;
  if (!target || number + 1 < target || (mode == FAIL && !numbers[kind])) return 0;
  int none = -1;
  return atomic_compare_exchange_strong(&struck, &none, kind);
}

static void end(void) { syscall(SYS_exit_group, 137); }

#define REAL(type, name, ...)                             \
  static type (*real)(__VA_ARGS__);                       \
  if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define RUN(type, kind, here, call)                       \
  int mine = (here) && chosen(kind);                      \
  if (mine && mode == FAIL) return errno = numbers[kind], -1; \
  type result = call;                                     \
  int kept = errno;                                       \
  if (mine) end();                                        \
  errno = kept;                                           \
  return result

#define OPENING(name, base, path, parameters, types, arguments)      \
  int name parameters {                                              \
    mode_t access = 0;                                               \
    if (flags & (O_CREAT | __O_TMPFILE)) {                           \
      va_list more;                                                  \
      va_start(more, flags);                                         \
      access = va_arg(more, mode_t);                                 \
      va_end(more);                                                  \
    }                                                                \
    REAL(int, #name, types);                                         \
    int here = at(base, path), kind = flags & O_CREAT ? CREATE : OPEN; \
    int mine = here && chosen(kind);                                 \
    if (mine && mode == FAIL) return errno = numbers[kind], -1;      \
    int file = real arguments;                                       \
    int kept = errno;                                                \
    if (mine) end();                                                 \
    if (file >= 0 && file < FILES) atomic_store(&below[file], here); \
    errno = kept;                                                    \
    return file;                                                     \
  }
#define OPEN_TYPES const char *, int, ...
#define OPENAT_TYPES int, const char *, int, ...
OPENING(open, AT_FDCWD, path, (const char *path, int flags, ...), OPEN_TYPES, (path, flags, access))
OPENING(open64, AT_FDCWD, path, (const char *path, int flags, ...), OPEN_TYPES, (path, flags, access))
OPENING(openat, base, path, (int base, const char *path, int flags, ...), OPENAT_TYPES, (base, path, flags, access))
OPENING(openat64, base, path, (int base, const char *path, int flags, ...), OPENAT_TYPES, (base, path, flags, access))

DIR *opendir(const char *path) {
  REAL(DIR *, "opendir", const char *);
  int mine = at(AT_FDCWD, path) && chosen(LIST);
  if (mine && mode == FAIL) return errno = numbers[LIST], NULL;
  DIR *result = real(path);
  if (mine) end();
  return result;
}

int close(int file) {  // the file is closed even if this fails, as on Linux
  REAL(int, "close", int);
  int here = is_below(file), mine = here && chosen(CLOSE);
  if (here) atomic_store(&below[file], 0);
  int result = real(file), kept = errno;
  if (mine && mode == FAIL) return errno = numbers[CLOSE], -1;
  if (mine) end();
  errno = kept;
  return result;
}

#define READING(name, parameters, types, arguments)  \
  ssize_t name parameters {                          \
    REAL(ssize_t, #name, types);                     \
    RUN(ssize_t, READ, is_below(file), real arguments); \
  }
#define COPY int, int, off_t *, size_t
#define BYTES int, void *, size_t
#define PLACE int, void *, size_t, off_t
READING(read, (int file, void *bytes, size_t count), BYTES, (file, bytes, count))
READING(pread, (int file, void *bytes, size_t count, off_t place), PLACE, (file, bytes, count, place))
READING(pread64, (int file, void *bytes, size_t count, off_t place), PLACE, (file, bytes, count, place))

#define WRITING(name, parameters, types, arguments)           \
  ssize_t name parameters {                                   \
    REAL(ssize_t, #name, types);                              \
    int mine = is_below(file) && chosen(WRITE);               \
    if (mine && mode == FAIL) return errno = numbers[WRITE], -1; \
    if (mine && mode == TORN) count /= 2;                     \
    ssize_t result = real arguments;                          \
    int kept = errno;                                         \
    if (mine) end();                                          \
    errno = kept;                                             \
    return result;                                            \
  }
WRITING(sendfile, (int file, int from, off_t *place, size_t count), COPY, (file, from, place, count))
WRITING(sendfile64, (int file, int from, off_t *place, size_t count), COPY, (file, from, place, count))
#define VECTOR int, const struct iovec *, int
#define SOURCE int, const void *, size_t
#define SOURCE_PLACE int, const void *, size_t, off_t
WRITING(write, (int file, const void *bytes, size_t count), SOURCE, (file, bytes, count))
WRITING(pwrite, (int file, const void *bytes, size_t count, off_t place), SOURCE_PLACE, (file, bytes, count, place))
WRITING(pwrite64, (int file, const void *bytes, size_t count, off_t place), SOURCE_PLACE, (file, bytes, count, place))
WRITING(writev, (int file, const struct iovec *parts, int count), VECTOR, (file, parts, count))

#define ON_FILE(name, kind, parameters, types, arguments) \
  int name parameters {                                   \
    REAL(int, #name, types);                              \
    RUN(int, kind, is_below(file), real arguments);       \
  }
#define SIZE int, off_t
#define FILE_MODE int, mode_t
ON_FILE(fsync, FSYNC, (int file), int, (file))
ON_FILE(fdatasync, FSYNC, (int file), int, (file))
ON_FILE(fchmod, CHMOD, (int file, mode_t access), FILE_MODE, (file, access))
ON_FILE(ftruncate, FTRUNCATE, (int file, off_t size), SIZE, (file, size))
ON_FILE(ftruncate64, FTRUNCATE, (int file, off_t size), SIZE, (file, size))

#define ON_PATH(name, kind, base, path, parameters, types, arguments) \
  int name parameters {                                               \
    REAL(int, #name, types);                                          \
    RUN(int, kind, at(base, path), real arguments);                   \
  }
#define NAME const char *
#define NAMES const char *, const char *
#define FOLDERS int, const char *, int, const char *
#define FOLDERS_FLAGS int, const char *, int, const char *, int
#define FOLDERS_UNSIGNED int, const char *, int, const char *, unsigned
#define NAME_MODE const char *, mode_t
#define FOLDER_MODE int, const char *, mode_t
#define FOLDER_MODE_FLAGS int, const char *, mode_t, int
#define FOLDER_FLAGS int, const char *, int
ON_PATH(rename, RENAME, AT_FDCWD, to, (const char *from, const char *to), NAMES, (from, to))
ON_PATH(renameat, RENAME, b, to, (int a, const char *from, int b, const char *to), FOLDERS, (a, from, b, to))
ON_PATH(renameat2, RENAME, b, to, (int a, const char *from, int b, const char *to, unsigned flags), FOLDERS_UNSIGNED,
        (a, from, b, to, flags))
ON_PATH(link, LINK, AT_FDCWD, to, (const char *from, const char *to), NAMES, (from, to))
ON_PATH(linkat, LINK, b, to, (int a, const char *from, int b, const char *to, int flags), FOLDERS_FLAGS,
        (a, from, b, to, flags))
ON_PATH(unlink, UNLINK, AT_FDCWD, path, (const char *path), NAME, (path))
ON_PATH(unlinkat, flags & AT_REMOVEDIR ? RMDIR : UNLINK, base, path, (int base, const char *path, int flags),
        FOLDER_FLAGS, (base, path, flags))
ON_PATH(mkdir, MKDIR, AT_FDCWD, path, (const char *path, mode_t access), NAME_MODE, (path, access))
ON_PATH(mkdirat, MKDIR, base, path, (int base, const char *path, mode_t access), FOLDER_MODE, (base, path, access))
ON_PATH(chmod, CHMOD, AT_FDCWD, path, (const char *path, mode_t access), NAME_MODE, (path, access))
ON_PATH(fchmodat, CHMOD, base, path, (int base, const char *path, mode_t access, int flags), FOLDER_MODE_FLAGS,
        (base, path, access, flags))
ON_PATH(rmdir, RMDIR, AT_FDCWD, path, (const char *path), NAME, (path))
