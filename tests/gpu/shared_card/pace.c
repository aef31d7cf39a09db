/* For LD_PRELOAD: the kernel paces each TCP socket at PACE_BYTES a second (SO_MAX_PACING_RATE, on loopback as well). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>

#ifndef SO_MAX_PACING_RATE
#define SO_MAX_PACING_RATE 47
#endif

static void pace(int socket) {
  const char* given = getenv("PACE_BYTES");
  struct sockaddr_storage address;
  socklen_t length = sizeof address;
  if (socket < 0 || !given || getsockname(socket, (struct sockaddr*)&address, &length)) return;
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return;
  uint64_t rate = strtoull(given, 0, 10);
  setsockopt(socket, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
}

int connect(int socket, const struct sockaddr* address, socklen_t length) {
  static int (*real)(int, const struct sockaddr*, socklen_t);
  if (!real) real = dlsym(RTLD_NEXT, "connect");
  pace(socket);
  return real(socket, address, length);
}

int accept(int socket, struct sockaddr* address, socklen_t* length) {
  static int (*real)(int, struct sockaddr*, socklen_t*);
  if (!real) real = dlsym(RTLD_NEXT, "accept");
  int accepted = real(socket, address, length);
  pace(accepted);
  return accepted;
}

int accept4(int socket, struct sockaddr* address, socklen_t* length, int flags) {
  static int (*real)(int, struct sockaddr*, socklen_t*, int);
  if (!real) real = dlsym(RTLD_NEXT, "accept4");
  int accepted = real(socket, address, length, flags);
  pace(accepted);
  return accepted;
}
