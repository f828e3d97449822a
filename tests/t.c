/* SPDX-License-Identifier: MIT
 *
 * The parent runs each test by executing itself again with `--here NAME`, so that a test begins in a fresh process: nothing inherited,
 * and what the library does about fork() is not in the way. Assertions abort (CMOCKA_TEST_ABORT), which also works on threads.
 *
 *     parent ---- fork + exec ----> child: main(--here NAME)
 *       |   output: a memfd, shown on failure
 *       |   note:   a memfd at T_NOTE_FD: the current seed, or why the test was skipped
 *       |   time:   sigtimedwait for SIGCHLD, then SIGKILL for the child's process group
 */
#include "t.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_SKIP = 77, DEFAULT_SECONDS = 30 };

typedef struct t_note {
    bool has_seed;
    uint64_t seed;
    char skip[256];
} t_note;

typedef enum t_result { T_PASSED, T_FAILED, T_SKIPPED } t_result;

static const t_case *current;
static int note_fd = -1;
static char tmpdir[PATH_MAX];

#if T_ASAN || T_TSAN
const char *__asan_default_options(void);
const char *__ubsan_default_options(void);
const char *__tsan_default_options(void);

const char *__asan_default_options(void)
{
    return "detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1";
}

const char *__ubsan_default_options(void)
{
    return "print_stacktrace=1";
}

const char *__tsan_default_options(void)
{
    return "halt_on_error=1:second_deadlock_stack=1";
}
#endif

static double env_number(const char *name, double otherwise)
{
    const char *text = getenv(name);
    if (text == NULL || text[0] == '\0') {
        return otherwise;
    }
    char *end;
    double value = strtod(text, &end);
    if (*end != '\0' || value <= 0) {
        fprintf(stderr, "%s: not a positive number: '%s'\n", name, text);
        exit(2);
    }
    return value;
}

/* ---------------------------------------------------------------- in the test's process */

void t_check_status(side_status got, side_status expected, const char *expr, const char *file, int line)
{
    if (got == expected) {
        return;
    }
    const side_error *error = side_last_error();
    t_fail(file, line, "%s is %s, not %s: %s", expr, side_status_name(got), side_status_name(expected),
           got < 0 ? error->message : "");
}

void t_fail(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    flockfile(stderr);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    funlockfile(stderr);
    va_end(args);
    fflush(NULL);
    abort();
}

static void note_write(const t_note *note)
{
    if (note_fd >= 0 && pwrite(note_fd, note, sizeof *note, 0) != (ssize_t)sizeof *note) {
        perror("note");
        abort();
    }
}

/* _exit: what the test had allocated until here is no leak. */
void t_skip(const char *format, ...)
{
    t_note note = {0};
    va_list args;
    va_start(args, format);
    vsnprintf(note.skip, sizeof note.skip, format, args);
    va_end(args);
    if (note_fd < 0) {
        printf("skip %s # %s\n", current->name, note.skip);
    }
    note_write(&note);
    fflush(NULL);
    _exit(EXIT_SKIP);
}

static bool one_thread;

void t_one_thread(void)
{
    if (T_TSAN) {
        T_SKIP("one thread: ThreadSanitizer sees nothing");
    }
    one_thread = true;
}

#if !T_SANITIZED
/* Stands before libc's for the whole program; sanitizers have theirs there. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *user)
{
    int (*libc_s)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

    if (one_thread) {
        T_FAIL("starts a thread after T_ONE_THREAD");
    }
    *(void **)&libc_s = dlsym(RTLD_NEXT, "pthread_create");
    return libc_s(thread, attributes, run, user);
}
#endif

void t_check_memory(const void *a, const void *b, size_t bytes, const char *file, int line)
{
    if (memcmp(a, b, bytes) != 0) {
        _assert_memory_equal(a, b, bytes, file, line);
    }
}

const char *t_arg(void)
{
    return current->arg;
}

uint64_t t_seed_first(void)
{
    const char *text = getenv("T_SEED");
    return text != NULL ? strtoull(text, NULL, 0) : 1;
}

uint64_t t_seeds(uint64_t count)
{
    if (getenv("T_SEED") != NULL) {
        return 1;
    }
    double scaled = (double)count * env_number("T_SEEDS_MULT", T_TSAN ? 0.1 : T_ASAN ? 0.25 : 1);
    return scaled < 1 ? 1 : (uint64_t)scaled;
}

bool t_seed_note(uint64_t seed)
{
    t_note note = {.has_seed = true, .seed = seed};
    note_write(&note);
    return true;
}

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)kind;
    (void)at;
    return remove(path);
}

static void remove_tree(const char *path)
{
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static void remove_tmpdir(void)
{
    remove_tree(tmpdir);
}

/* Named after the parent, which removes it also where the test died. */
static void tmpdir_path(char *path, size_t bytes, pid_t owner)
{
    const char *base = getenv("TMPDIR");
    snprintf(path, bytes, "%s/sidestream-t.%ld", base != NULL ? base : "/tmp", (long)owner);
}

const char *t_tmpdir(void)
{
    if (tmpdir[0] == '\0') {
        bool alone = note_fd < 0;
        tmpdir_path(tmpdir, sizeof tmpdir, alone ? getpid() : getppid());
        if (mkdir(tmpdir, 0700) != 0) {
            T_FAIL("mkdir %s: %s", tmpdir, strerror(errno));
        }
        if (alone) {
            atexit(remove_tmpdir);
        }
    }
    return tmpdir;
}

static uint64_t splitmix64(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

t_rng t_rng_make(uint64_t seed)
{
    t_rng rng;
    for (int i = 0; i < 4; i++) {
        rng.state[i] = splitmix64(&seed);
    }
    return rng;
}

static uint64_t rotl(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

uint64_t t_rng_next(t_rng *rng)
{
    uint64_t *s = rng->state;
    uint64_t result = rotl(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return result;
}

/* Without bias: numbers below 2^64 mod bound are drawn again. */
uint64_t t_rng_below(t_rng *rng, uint64_t bound)
{
    uint64_t least = (0 - bound) % bound;
    uint64_t x;
    do {
        x = t_rng_next(rng);
    } while (x < least);
    return x % bound;
}

bool t_rng_chance(t_rng *rng, uint64_t one_in)
{
    return t_rng_below(rng, one_in) == 0;
}

void t_rng_fill(t_rng *rng, void *data, size_t bytes)
{
    unsigned char *at = data;
    while (bytes > 0) {
        uint64_t x = t_rng_next(rng);
        size_t n = bytes < sizeof x ? bytes : sizeof x;
        memcpy(at, &x, n);
        at += n;
        bytes -= n;
    }
}

static const t_case *find_case(const char *name)
{
    for (const t_case *c = t_cases; c->name != NULL; c++) {
        if (strcmp(c->name, name) == 0) {
            return c;
        }
    }
    fprintf(stderr, "no test '%s'; --list names them\n", name);
    exit(2);
}

static int run_here(const char *name)
{
    current = find_case(name);
    const char *fd = getenv("T_NOTE_FD");
    if (fd != NULL) {
        note_fd = atoi(fd);
        unsetenv("T_NOTE_FD");
        fcntl(note_fd, F_SETFD, FD_CLOEXEC);
    }
    setenv("CMOCKA_TEST_ABORT", "1", 1);
    current->run();
    fflush(NULL);
    return 0;
}

/* ---------------------------------------------------------------- in the parent */

typedef struct t_child {
    pid_t pid;
    int output_fd, note_fd;
    bool timed_out;
    int wait_status;
} t_child;

static void die(const char *what)
{
    perror(what);
    exit(2);
}

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static double limit_s(const t_case *c)
{
    double seconds = c->seconds > 0 ? c->seconds : DEFAULT_SECONDS;
    return seconds * (T_TSAN ? 6 : T_ASAN ? 4 : 1) * env_number("T_TIMEOUT_MULT", 1);
}

static void child_start(t_child *child, const t_case *c)
{
    child->timed_out = false;
    child->output_fd = memfd_create("output", MFD_CLOEXEC);
    child->note_fd = memfd_create("note", 0);
    if (child->output_fd < 0 || child->note_fd < 0) {
        die("memfd_create");
    }
    fflush(NULL);
    pid_t parent = getpid();
    child->pid = fork();
    if (child->pid < 0) {
        die("fork");
    }
    if (child->pid > 0) {
        return;
    }
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(2);
    }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int null_fd = open("/dev/null", O_RDONLY);
    dup2(null_fd, 0);
    dup2(child->output_fd, 1);
    dup2(child->output_fd, 2);
    char fd[16];
    snprintf(fd, sizeof fd, "%d", child->note_fd);
    setenv("T_NOTE_FD", fd, 1);
    char option[] = "--here";
    char *name = strdup(c->name);
    char *argv[] = {program_invocation_name, option, name, NULL};
    execv("/proc/self/exe", argv);
    perror("exec");
    _exit(2);
}

/* SIGCHLD is blocked in this process, so it cannot slip in between waitpid and sigtimedwait. */
static void child_wait(t_child *child, double seconds)
{
    sigset_t sigchld;
    sigemptyset(&sigchld);
    sigaddset(&sigchld, SIGCHLD);
    double end = now_s() + seconds;
    for (;;) {
        pid_t pid = waitpid(child->pid, &child->wait_status, WNOHANG);
        if (pid == child->pid) {
            break;
        }
        double left = end - now_s();
        if (left <= 0) {
            child->timed_out = true;
            kill(-child->pid, SIGKILL);
            waitpid(child->pid, &child->wait_status, 0);
            break;
        }
        struct timespec ts = {.tv_sec = (time_t)left, .tv_nsec = (long)((left - (double)(time_t)left) * 1e9)};
        sigtimedwait(&sigchld, NULL, &ts);
    }
    kill(-child->pid, SIGKILL); /* what the test started and left behind */
}

/* Indented, so that no line of a test's output is taken for one of the harness. At most the last 64 KiB. */
static void show_output(int fd)
{
    enum { MOST = 64 << 10 };
    static char text[MOST];
    off_t end = lseek(fd, 0, SEEK_END);
    off_t from = end > MOST ? end - MOST : 0;
    ssize_t bytes = pread(fd, text, MOST, from);
    if (from > 0) {
        printf("  | ...\n");
    }
    for (ssize_t at = 0; at < bytes;) {
        char *newline = memchr(text + at, '\n', (size_t)(bytes - at));
        ssize_t stop = newline != NULL ? newline - text : bytes;
        printf("  | %.*s\n", (int)(stop - at), text + at);
        at = stop + 1;
    }
}

static t_result report(const t_case *c, const t_child *child, double limit)
{
    t_note note = {0};
    bool noted = pread(child->note_fd, &note, sizeof note, 0) == (ssize_t)sizeof note;
    int status = child->wait_status;
    bool exited = WIFEXITED(status) && !child->timed_out;
    if (exited && WEXITSTATUS(status) == 0) {
        printf("ok %s\n", c->name);
        if (getenv("T_VERBOSE") != NULL) {
            show_output(child->output_fd);
        }
        return T_PASSED;
    }
    if (exited && WEXITSTATUS(status) == EXIT_SKIP && noted && note.skip[0] != '\0') {
        printf("skip %s # %s\n", c->name, note.skip);
        return T_SKIPPED;
    }
    printf("FAIL %s: ", c->name);
    if (child->timed_out) {
        printf("time limit of %g s", limit);
    } else if (exited) {
        printf("exit code %d", WEXITSTATUS(status));
    } else if (WTERMSIG(status) == SIGABRT) {
        printf("assertion or abort");
    } else {
        printf("killed by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    }
    if (noted && note.has_seed) {
        printf(", seed %llu", (unsigned long long)note.seed);
    }
    printf("\n");
    show_output(child->output_fd);
    return T_FAILED;
}

static t_result run_case(const t_case *c)
{
    t_child child;
    double limit = limit_s(c);
    child_start(&child, c);
    child_wait(&child, limit);
    t_result result = report(c, &child, limit);
    fflush(stdout);
    close(child.output_fd);
    close(child.note_fd);
    char path[PATH_MAX];
    tmpdir_path(path, sizeof path, getpid());
    remove_tree(path);
    return result;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (const t_case *c = t_cases; c->name != NULL; c++) {
            puts(c->name);
        }
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "--here") == 0) {
        return run_here(argv[2]);
    }
    sigset_t sigchld;
    sigemptyset(&sigchld);
    sigaddset(&sigchld, SIGCHLD);
    sigprocmask(SIG_BLOCK, &sigchld, NULL);
    unsigned counts[3] = {0};
    if (argc > 1) {
        for (int i = 1; i < argc; i++) {
            counts[run_case(find_case(argv[i]))]++;
        }
    } else {
        for (const t_case *c = t_cases; c->name != NULL; c++) {
            counts[run_case(c)]++;
        }
    }
    printf("%u passed, %u failed, %u skipped\n", counts[T_PASSED], counts[T_FAILED], counts[T_SKIPPED]);
    return counts[T_FAILED] > 0;
}
