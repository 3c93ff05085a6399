/* A libnvidia-ml.so.1 whose cards are described by a text file: it tests the real binding without a card.
 *
 * The variable FAKE_NVML names the file. The library reads it again at every call, since a test replaces it while
 * processes run. Each line is `key value`. If a key is in several lines, the last one counts:
 *     count 8                  cards
 *     init 9                   nvmlInit fails with this error
 *     0.error 15               every call on card 0 fails with this error
 *     0.hang 1                 every call on card 0 sleeps until this line is gone
 *     0.listed 15              the handle of card 0 fails with this error
 *     0.total, 0.free          bytes; `na`: not supported; `forbidden`: no permission
 *     0.name, 0.uuid           defaults: Fake 80GB and GPU-…0
 *     0.ats 1                  its addressing mode is ATS
 *     0.processes 41:1024,42:na
 *     0.sensors 999            utilization, temperature and power of card 0 fail with this error
 *     0.pcie 1500000,20000     kB a second to the card, and from it; not supported without this line
 *     0.mig 3                  card 0 is partitioned into three instances; `0.1.free` is the second one's
 * `all.` in place of the number is the default for all cards.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, FORBIDDEN = 4, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9 };
#define MOST 64
#define PARTS 8            /* a card and at most seven instances */
static char cards[MOST * PARTS];   /* a handle is an address in this array: of a card or an instance */
#define INDEX(card) ((int)((char *)(card) - cards) / PARTS)
#define PART(card) ((int)((char *)(card) - cards) % PARTS - 1)     /* -1: the whole card */
static int started;

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } process_t;

static int line(const char *key, char *value, size_t room) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char row[8192], name[64];
    int found = 0, at = 0;
    if (!file) return 0;
    while (fgets(row, sizeof row, file))
        if (sscanf(row, "%63s %n", name, &at) == 1 && !strcmp(name, key)) {
            snprintf(value, room, "%s", row + at);
            value[strcspn(value, "\n")] = 0;
            found = 1;
        }
    fclose(file);
    return found;
}

static int of_whole(void *card, const char *key, char *value, size_t room) {
    char name[64];
    snprintf(name, sizeof name, "%d.%s", INDEX(card), key);
    if (line(name, value, room)) return 1;
    snprintf(name, sizeof name, "all.%s", key);
    return line(name, value, room);
}

static int of_card(void *card, const char *key, char *value, size_t room) {
    char name[64];
    if (PART(card) < 0) return of_whole(card, key, value, room);
    snprintf(name, sizeof name, "%d.%d.%s", INDEX(card), PART(card), key);
    return line(name, value, room);
}

static int enter(void *card) {
    char value[64];
    if (!started) return UNINITIALIZED;
    if (!card) return SUCCESS;
    if ((char *)card < cards || (char *)card >= cards + MOST * PARTS) return INVALID;
    while (of_whole(card, "hang", value, sizeof value)) usleep(5000);
    return of_whole(card, "error", value, sizeof value) ? atoi(value) : SUCCESS;
}
#define ENTER(card) do { int failed = enter(card); if (failed) return failed; } while (0)

int nvmlInitWithFlags(unsigned flags) {
    char value[64];
    (void)flags;
    if (line("init", value, sizeof value)) return atoi(value);
    if (!line("count", value, sizeof value)) return NOT_LOADED;
    started = 1;
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { started = 0; return SUCCESS; }

const char *nvmlErrorString(int error) {
    switch (error) {
    case NOT_SUPPORTED: return "Not Supported";
    case FORBIDDEN: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case NOT_LOADED: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char value[64];
    ENTER(NULL);
    *count = line("count", value, sizeof value) ? (unsigned)atoi(value) : 0;
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **card) {
    ENTER(NULL);
    if (index >= MOST) return INVALID;
    char value[64];
    *card = cards + index * PARTS;
    return of_whole(*card, "listed", value, sizeof value) ? atoi(value) : SUCCESS;
}
int nvmlDeviceGetName(void *card, char *name, unsigned room) {
    char value[96];
    ENTER(card);
    snprintf(name, room, "%s%s", of_whole(card, "name", value, sizeof value) ? value : "Fake 80GB",
             PART(card) < 0 ? "" : " MIG 1g.10gb");
    return SUCCESS;
}
int nvmlDeviceGetUUID(void *card, char *uuid, unsigned room) {
    char value[96];
    ENTER(card);
    if (of_card(card, "uuid", value, sizeof value)) snprintf(uuid, room, "%s", value);
    else if (PART(card) < 0) snprintf(uuid, room, "GPU-00000000-0000-0000-0000-%012d", INDEX(card));
    else snprintf(uuid, room, "MIG-00000000-0000-0000-%04d-%012d", PART(card), INDEX(card));
    return SUCCESS;
}
static int parts(void *card) {
    char value[64];
    return of_whole(card, "mig", value, sizeof value) ? atoi(value) : -1;
}
int nvmlDeviceGetMigMode(void *card, unsigned *now, unsigned *pending) {
    ENTER(card);
    *now = *pending = parts(card) >= 0;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(void *card, unsigned *count) {
    ENTER(card);
    *count = PARTS - 1;
    return SUCCESS;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *card, unsigned place, void **part) {
    ENTER(card);
    if ((int)place >= parts(card)) return NOT_FOUND;
    *part = (char *)card + 1 + place;
    return SUCCESS;
}
typedef struct { unsigned version, value; } addressing_t;
int nvmlDeviceGetAddressingMode(void *card, addressing_t *mode) {
    char value[64];
    ENTER(card);
    mode->value = of_whole(card, "ats", value, sizeof value) ? 2 : 0;
    return SUCCESS;
}
int nvmlSystemGetDriverVersion(char *version, unsigned room) { ENTER(NULL); snprintf(version, room, "580.65.06"); return SUCCESS; }
int nvmlSystemGetNVMLVersion(char *version, unsigned room) { ENTER(NULL); snprintf(version, room, "13.580.65.06"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { ENTER(NULL); *version = 13000; return SUCCESS; }
int nvmlDeviceGetMemoryInfo(void *card, memory_t *memory) {
    char total[64] = "", free[64] = "";
    ENTER(card);
    of_card(card, "total", total, sizeof total);
    of_card(card, "free", free, sizeof free);
    if (!strcmp(total, "na") || !strcmp(free, "na")) return NOT_SUPPORTED;
    if (!strcmp(total, "forbidden") || !strcmp(free, "forbidden")) return FORBIDDEN;
    memory->total = *total ? strtoull(total, NULL, 0) : (PART(card) < 0 ? 80ULL : 10ULL) << 30;
    memory->free = *free ? strtoull(free, NULL, 0) : memory->total;
    memory->used = memory->total - memory->free;
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned *count, process_t *into) {
    char value[8192], *rest = NULL;
    unsigned found = 0;
    ENTER(card);
    if (of_card(card, "processes", value, sizeof value))
        for (char *one = strtok_r(value, ",", &rest); one; one = strtok_r(NULL, ",", &rest), found++) {
            char *size = strchr(one, ':');
            if (!into || found >= *count) continue;
            memset(&into[found], 0, sizeof *into);
            into[found].pid = (unsigned)atoi(one);
            into[found].used = !size || !strcmp(size + 1, "na") ? ~0ULL : strtoull(size + 1, NULL, 0);
        }
    int small = found > *count;
    *count = found;
    return small ? TOO_SMALL : SUCCESS;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *card, unsigned *count, process_t *into) {
    (void)into;
    ENTER(card);
    *count = 0;
    return SUCCESS;
}
static int sensors(void *card) {
    char value[64];
    int failed = enter(card);
    if (failed) return failed;
    return of_whole(card, "sensors", value, sizeof value) ? atoi(value) : SUCCESS;
}
#define SENSORS(card) do { int failed = sensors(card); if (failed) return failed; } while (0)

/* An instance has no utilization figure and no sensor. */
int nvmlDeviceGetUtilizationRates(void *card, utilization_t *rates) {
    SENSORS(card);
    if (PART(card) >= 0) return NOT_SUPPORTED;
    rates->gpu = 37;
    rates->memory = 5;
    return SUCCESS;
}
int nvmlDeviceGetTemperature(void *card, unsigned sensor, unsigned *degrees) {
    (void)sensor;
    SENSORS(card);
    if (PART(card) >= 0) return INVALID;
    *degrees = 61;
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(void *card, unsigned *milliwatts) {
    SENSORS(card);
    if (PART(card) >= 0) return INVALID;
    *milliwatts = 412000;
    return SUCCESS;
}
/* 0: what the card sends, 1: what it receives */
int nvmlDeviceGetPcieThroughput(void *card, unsigned way, unsigned *kilobytes) {
    char value[64], *sent;
    ENTER(card);
    if (PART(card) >= 0 || !of_whole(card, "pcie", value, sizeof value)) return NOT_SUPPORTED;
    sent = strchr(value, ',');
    *kilobytes = (unsigned)strtoul(way || !sent ? value : sent + 1, NULL, 0);
    return SUCCESS;
}
