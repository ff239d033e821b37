/* Stub of `farm_runner --serve` (docs/reference/native_runner.md) for benchmarks of the farm, without computation. The
 * words of a program select the result of its job:
 *
 *     BEHAVIOUR LATENCY_MS
 *
 * pass     after LATENCY_MS of sleep the outputs equal the inputs, as the bundle expects
 * wrong    the same with the other sign
 * crash    a segmentation fault after LATENCY_MS
 * hang     no answer; after --timeout_ms the answer of a watchdog
 * refused  the load fails
 *
 * It is written in C, because thousands of jobs on dozens of devices share a small machine with the measured farm.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { LINE_BYTES = 1 << 16, TENSOR_BYTES = 1 << 20, INFERENCES = 256 };

static char line[LINE_BYTES], answer[LINE_BYTES];
static size_t used;

static void say(const char *format, ...) {
    va_list values;
    va_start(values, format);
    int count = vsnprintf(answer + used, sizeof answer - used, format, values);
    va_end(values);
    if (count < 0 || (used += (size_t)count) >= sizeof answer) _exit(7);
}

static void send_answer(void) {
    for (size_t sent = 0; sent < used;) {
        ssize_t count = write(STDOUT_FILENO, answer + sent, used - sent);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) _exit(10);
        sent += (size_t)count;
    }
    used = 0;
}

static void fail(long job, const char *stage, int code, const char *message, int last) {
    say("{\"schema\": 1, \"ok\": false, \"exit_code\": %d, \"job\": %ld, \"load_ns\": 0, \"error\": {\"stage\": \"%s\", "
        "\"message\": \"%s\", \"code\": null, \"line\": null}%s}\n",
        code, job, stage, message, last ? ", \"last\": true" : "");
    send_answer();
}

/* Returns the value of --name=value in a line of words without quotes, which one blank separates. */
static const char *flag(char **words, int count, const char *name, const char *otherwise) {
    size_t length = strlen(name);
    for (int n = 0; n < count; n++)
        if (!strncmp(words[n], "--", 2) && !strncmp(words[n] + 2, name, length) && words[n][2 + length] == '=')
            return words[n] + 3 + length;
    return otherwise;
}

static ssize_t read_file(const char *path, char *into, size_t most) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ssize_t count = read(file, into, most);
    close(file);
    return count;
}

static int write_file(const char *path, const char *data, size_t size) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) return -1;
    ssize_t count = write(file, data, size);
    return close(file) || count != (ssize_t)size ? -1 : 0;
}

static void sleep_ms(long ms) {
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

static void list_times(const char *name, int count, long long each) {
    say("\"%s\": [", name);
    for (int n = 0; n < count; n++) say(n ? ", %lld" : "%lld", each);
    say("]");
}

static void run(long job, char **words, int count) {
    static char model[256], list[LINE_BYTES], tensor[TENSOR_BYTES];
    char behaviour[32] = "", place[4096];
    long latency_ms = 0;
    ssize_t size = read_file(flag(words, count, "model_path", "model.pte"), model, sizeof model - 1);
    if (size >= 0) model[size] = 0;
    if (size < 0 || sscanf(model, "%31s %ld", behaviour, &latency_ms) != 2 || !strcmp(behaviour, "refused")) {
        fail(job, "load", 4, "the stub refuses this program", 0);
        return;
    }
    size = read_file(flag(words, count, "input_list_path", "input_list.txt"), list, sizeof list - 1);
    if (size <= 0) {
        fail(job, "inputs", 5, "there is no input list", 0);
        return;
    }
    list[size] = 0;
    if (!strcmp(behaviour, "hang")) {
        long limit_ms = atol(flag(words, count, "timeout_ms", "0"));
        if (!limit_ms) for (;;) pause();
        sleep_ms(limit_ms);
        fail(job, "execute", 9, "not finished in time", 1);
        _exit(9);
    }
    sleep_ms(latency_ms);
    if (!strcmp(behaviour, "crash")) raise(SIGSEGV);
    if (strcmp(behaviour, "pass") && strcmp(behaviour, "wrong")) {
        fail(job, "load", 4, "the stub does not know this behaviour", 0);
        return;
    }
    const char *outputs = flag(words, count, "output_folder_path", "outputs");
    const char *etdump = flag(words, count, "etdump_path", "");
    int samples = 0;
    for (char *rest = list, *names; (names = strsep(&rest, "\n")) && *names && samples < INFERENCES; samples++) {
        names[strcspn(names, " ")] = 0;
        size = read_file(names, tensor, sizeof tensor);
        if (size < 0) {
            fail(job, "inputs", 5, "an input is missing", 0);
            return;
        }
        if (!strcmp(behaviour, "wrong"))
            for (ssize_t n = 3; n < size; n += 4) tensor[n] ^= (char)0x80;
        snprintf(place, sizeof place, "%s/output_%d_0.raw", outputs, samples);
        if (write_file(place, tensor, (size_t)size)) {
            fail(job, "outputs", 7, strerror(errno), 0);
            return;
        }
    }
    if (*etdump) write_file(etdump, "", 0);
    int iterations = atoi(flag(words, count, "iteration", "1")), warm_up = atoi(flag(words, count, "warm_up", "0"));
    if (iterations < 1 || iterations > 64 || warm_up < 0 || warm_up > 64 || !samples) {
        fail(job, "flags", 2, "the stub takes up to 64 iterations, and needs a sample", 0);
        return;
    }
    long long each = latency_ms * 1000000LL / (iterations + warm_up) / samples + 1;
    say("{\"schema\": 1, \"ok\": true, \"exit_code\": 0, \"job\": %ld, \"error\": null, \"method\": \"forward\", "
        "\"warm\": true, \"load_ns\": 1000, \"inputs\": [], \"outputs\": [{\"shape\": [%zd], \"dtype\": \"float32\", "
        "\"nbytes\": %zd}], \"versions\": {\"runner\": \"stub\"}, \"inferences\": [", job, size / 4, size);
    for (int n = 0; n < samples; n++) {
        say(n ? ", {\"line\": %d, " : "{\"line\": %d, ", n);
        list_times("warm_up_ns", warm_up, each);
        say(", ");
        list_times("iterations_ns", iterations, each);
        say(", \"differing\": {\"count\": 0, \"executions\": []}");
        say("}");
    }
    say("]}\n");
    send_answer();
}

int main(void) {
    const struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    signal(SIGPIPE, SIG_IGN);
    int start = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    say("{\"schema\": 1, \"ready\": true, \"pid\": %d, \"versions\": {\"runner\": \"stub\"}}\n", (int)getpid());
    send_answer();
    for (long job = 0; fgets(line, sizeof line, stdin);) {
        char *words[64], *rest = line, *word;
        int count = 0;
        while (count < 64 && (word = strsep(&rest, " \n")))
            if (*word) words[count++] = word;
        if (!count) continue;
        dprintf(STDERR_FILENO, "farm_runner: job %ld begins\n", job);
        if (fchdir(start) || chdir(flag(words, count, "working_folder", ".")))
            fail(job, "flags", 2, "there is no such working folder", 0);
        else
            run(job, words, count);
        dprintf(STDERR_FILENO, "farm_runner: job %ld ends\n", job);
        job++;
    }
    return 0;
}
