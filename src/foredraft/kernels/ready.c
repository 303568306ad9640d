/* What this library was built from, and whether it may run.
 *
 * Whether the system lets this process run this level. Only AMX has to ask: its registers take 8 KiB of every thread,
 * which Linux sets aside for processes that want them (5.16 and later). */
#include "foredraft.h"

const char *fd_sources(void) { return FD_SOURCES; }
const char *fd_build(void) { return FD_BUILD " " __VERSION__; }

#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* One grant holds for all threads of the process and for its children. */
int fd_ready(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? FD_REFUSED : FD_OK; }

#elif defined(__AMX_TILE__)
int fd_ready(void) { return FD_REFUSED; }
#else
int fd_ready(void) { return FD_OK; }
#endif
