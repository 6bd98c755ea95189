// Preloaded into redis-server by TestChaos_clock: its wall clock is ahead by the microseconds in the file that RECOVERY_TEST_CLOCK names.
// The monotonic clock is left alone, as it is when somebody sets a machine's time.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead;

__attribute__((constructor)) static void map_file(void) {
	const char *path = getenv("RECOVERY_TEST_CLOCK");
	int fd = path ? open(path, O_RDONLY) : -1;
	void *p = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		abort();
	ahead = p;
}

int clock_gettime(clockid_t id, struct timespec *ts) {
	int r = syscall(SYS_clock_gettime, id, ts);
	if (r == 0 && ahead && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
		int64_t ns = ts->tv_sec * 1000000000LL + ts->tv_nsec + *ahead * 1000LL;
		ts->tv_sec = ns / 1000000000LL;
		ts->tv_nsec = ns % 1000000000LL;
	}
	return r;
}

int gettimeofday(struct timeval *tv, void *zone) {
	struct timespec ts;
	int r = clock_gettime(CLOCK_REALTIME, &ts);
	(void)zone;
	tv->tv_sec = ts.tv_sec;
	tv->tv_usec = ts.tv_nsec / 1000;
	return r;
}

time_t time(time_t *t) {
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	if (t)
		*t = ts.tv_sec;
	return ts.tv_sec;
}
