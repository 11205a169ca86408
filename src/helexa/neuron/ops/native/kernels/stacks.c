/* Native stack traces of all threads of this process, which the server requests from a hung engine by a signal. The
 * thread that receives the signal sends it to one thread after another, and each thread writes its own stack to
 * standard error. All functions that the signal handler calls are async-signal-safe. */
#define _GNU_SOURCE
#include <stdint.h>

void dump_stacks_on(int64_t number);

#if defined(__linux__) && __has_include(<execinfo.h>)
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FRAMES 32
#define PAUSE 1000000      /* ns between two checks whether a thread has written its stack */
#define THREAD_PAUSES 200  /* maximum pauses for one thread, which may wait for a disk and not answer */
#define MOST_PAUSES 2000   /* maximum pauses for all threads together */

/* An entry of a folder, as the system call getdents64 returns it. */
typedef struct {
    uint64_t inode;
    int64_t next;
    uint16_t size;
    uint8_t type;
    char name[];
} folder_entry;

static _Atomic int64_t turn; /* id of the thread that must write its stack, negative while it writes; or 0 */
static atomic_flag dumping = ATOMIC_FLAG_INIT;
static int64_t pauses; /* number of pauses in the current dump */

static void write_text(const char *text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return;
}

static void write_stack(const char *thread) {
    void *frames[FRAMES];
    int count = backtrace(frames, FRAMES);
    write_text("native stack of thread "), write_text(thread), write_text(":\n");
    backtrace_symbols_fd(frames, count, STDERR_FILENO);
}

static int64_t this_thread(void) { return syscall(SYS_gettid); }

/* Write the number in decimal digits. */
static void format(int64_t number, char text[24]) {
    char digits[24];
    int count = 0;
    do digits[count++] = '0' + number % 10;
    while ((number /= 10) > 0);
    for (int i = 0; i < count; i++) text[i] = digits[count - 1 - i];
    text[count] = 0;
}

/* Make the thread `thread` write its stack, and wait until it has written the stack. */
static void request_stack(int64_t thread, int number) {
    struct timespec moment = {0, PAUSE};
    atomic_store(&turn, thread);
    if (syscall(SYS_tgkill, getpid(), thread, number)) return;
    for (int i = 0; atomic_load(&turn) && pauses < MOST_PAUSES; i++, pauses++) {
        int64_t expected = thread; /* a thread that has begun to write is not interrupted by the next one */
        if (i >= THREAD_PAUSES && atomic_compare_exchange_strong(&turn, &expected, 0)) return;
        nanosleep(&moment, NULL);
    }
}

static void request_stacks(int number) {
    _Alignas(folder_entry) char buffer[4096];
    char own[24];
    int64_t size, self = this_thread();
    int folder = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return;
    pauses = 0;
    format(self, own);
    while ((size = syscall(SYS_getdents64, folder, buffer, sizeof buffer)) > 0)
        for (int64_t at = 0; at < size && pauses < MOST_PAUSES;) {
            folder_entry *entry = (folder_entry *)(buffer + at);
            int64_t thread = 0;
            for (const char *c = entry->name; *c >= '0' && *c <= '9'; c++) thread = 10 * thread + *c - '0';
            at += entry->size;
            if (thread == self) write_stack(own);
            else if (thread) request_stack(thread, number);
        }
    close(folder);
    atomic_store(&turn, 0);
}

static void on_signal(int number, siginfo_t *info, void *context) {
    int error = errno;
    int64_t self = this_thread(), expected = self;
    (void)context;
    if (info->si_code == SI_TKILL) { /* from `request_stack`; too late if another thread has its turn */
        if (atomic_compare_exchange_strong(&turn, &expected, -self)) {
            char name[24];
            format(self, name);
            write_stack(name);
            atomic_store(&turn, 0);
        }
    } else if (!atomic_flag_test_and_set(&dumping)) {
        request_stacks(number);
        atomic_flag_clear(&dumping);
    }
    errno = error;
}

/* Write the native stacks of all threads to standard error whenever another process sends the signal `number`. */
void dump_stacks_on(int64_t number) {
    void *frame;
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART};
    backtrace(&frame, 1); /* the first call loads a library, which a signal handler must not do */
    sigemptyset(&action.sa_mask);
    sigaction((int)number, &action, NULL);
}
#else
void dump_stacks_on(int64_t number) { (void)number; } /* the C library has no `backtrace` */
#endif
