// recorder.c stands in for librdmacm.so.1 and libibverbs.so.1, for a process
// that finds it under these names in LD_LIBRARY_PATH. It passes every call on to
// the libraries REAL_CM and REAL_VERBS, paths that the compiler is given, and
// appends a line to the file RDMANET_TEST_RECORD for each call that matters to
// the end of a connection:
//
//	rdma_create_qp qp=7f8a10 id=7f8b20 pd=7f8c30 cq=7f8d40
//
// All values are hexadecimal. What frees, ends, posts or acks is written before
// it is done, and what makes, gets or polls after it: so an address is given up
// in the record before it is used again, and a work request posted before it
// completes. "failed" follows a call that did not do what stands there.
#define _GNU_SOURCE
#include "abi.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *real_cm, *real_verbs;
static int file;

static void give_up(const char *why)
{
	fprintf(stderr, "recorder: %s\n", why);
	abort();
}

// The real libraries come before this one where they look for each other's
// functions, and for the drivers: what they call among themselves is not ours.
static void *open_real(const char *path)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);

	if (!library)
		give_up(dlerror());
	return library;
}

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("RDMANET_TEST_RECORD");

	real_verbs = open_real(REAL_VERBS);
	file = open(path ? path : "", O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	if (file < 0)
		give_up("RDMANET_TEST_RECORD cannot be written");
}

// The real librdmacm is opened late: whoever asked for it by its name would find
// it instead of this one.
static void *real(const char *name)
{
	void *f;

	if (!real_cm && !strncmp(name, "rdma_", 5))
		real_cm = open_real(REAL_CM);
	f = dlsym(strncmp(name, "rdma_", 5) ? real_verbs : real_cm, name);
	if (!f)
		give_up(dlerror());
	return f;
}

// REAL is the function that is called as the one it stands in.
#define REAL(name) ((__typeof__(&name))real(#name))

// One write is one line, whoever else writes.
__attribute__((format(printf, 1, 2))) static void record(const char *format, ...)
{
	char line[256];
	int n, saved = errno;
	va_list ap;

	va_start(ap, format);
	n = vsnprintf(line, sizeof(line), format, ap);
	va_end(ap);
	if (write(file, line, n) != n)
		give_up("the record cannot be written");
	errno = saved;
}

#define P(pointer) ((unsigned long)(pointer))

static int freed(const char *name, int ret)
{
	if (ret)
		record("failed %s\n", name);
	return ret;
}

// Passed on unseen. An ifunc is the function that its resolver returns.
typedef void function(void);
#define FORWARD(name)                                                       \
	static function *find_##name(void) { return (function *)real(#name); } \
	void name(void) __attribute__((ifunc("find_" #name)))

FORWARD(rdma_bind_addr);
FORWARD(rdma_free_devices);
FORWARD(rdma_get_devices);
FORWARD(rdma_listen);
FORWARD(rdma_migrate_id);
FORWARD(rdma_reject);
FORWARD(rdma_resolve_addr);
FORWARD(rdma_resolve_route);
FORWARD(rdma_set_option);
FORWARD(ibv_close_device);
FORWARD(ibv_free_device_list);
FORWARD(ibv_get_device_list);
FORWARD(ibv_open_device);
FORWARD(ibv_query_device);
FORWARD(ibv_query_gid);
FORWARD(ibv_query_port);

struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct rdma_event_channel *channel = REAL(rdma_create_event_channel)();

	if (channel)
		record("rdma_create_event_channel channel=%lx\n", P(channel));
	return channel;
}

void rdma_destroy_event_channel(struct rdma_event_channel *channel)
{
	record("rdma_destroy_event_channel channel=%lx\n", P(channel));
	REAL(rdma_destroy_event_channel)(channel);
}

int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event)
{
	int ret = REAL(rdma_get_cm_event)(channel, event);

	if (ret)
		return ret;
	// The one way to get an id that was not created.
	if ((*event)->event == RDMA_CM_EVENT_CONNECT_REQUEST)
		record("CONNECT_REQUEST id=%lx channel=%lx\n", P((*event)->id), P(channel));
	record("rdma_get_cm_event event=%lx id=%lx channel=%lx type=%x\n", P(*event), P((*event)->id), P(channel), (*event)->event);
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *event)
{
	record("rdma_ack_cm_event event=%lx\n", P(event));
	return freed(__func__, REAL(rdma_ack_cm_event)(event));
}

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context, int ps)
{
	int ret = REAL(rdma_create_id)(channel, id, context, ps);

	if (ret == 0)
		record("rdma_create_id id=%lx channel=%lx\n", P(*id), P(channel));
	return ret;
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	record("rdma_destroy_id id=%lx\n", P(id));
	return freed(__func__, REAL(rdma_destroy_id)(id));
}

static int port_of(struct sockaddr_storage *addr)
{
	return ntohs(((struct sockaddr_in *)addr)->sin_port); // where IPv6 has it, too
}

static void connected(const char *name, struct rdma_cm_id *id)
{
	record("%s id=%lx local=%x peer=%x\n", name, P(id), port_of(&id->route.addr.src_storage), port_of(&id->route.addr.dst_storage));
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *param)
{
	int ret = REAL(rdma_connect)(id, param);

	if (ret == 0)
		connected(__func__, id);
	return ret;
}

int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *param)
{
	int ret = REAL(rdma_accept)(id, param);

	if (ret == 0)
		connected(__func__, id);
	return ret;
}

int rdma_disconnect(struct rdma_cm_id *id)
{
	record("rdma_disconnect id=%lx\n", P(id));
	return REAL(rdma_disconnect)(id);
}

int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	int ret = REAL(rdma_create_qp)(id, pd, attr);

	if (ret == 0)
		record("rdma_create_qp qp=%lx id=%lx pd=%lx cq=%lx\n", P(id->qp), P(id), P(pd), P(attr->send_cq));
	return ret;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp *qp = REAL(ibv_create_qp)(pd, attr);

	if (qp)
		record("ibv_create_qp qp=%lx pd=%lx cq=%lx\n", P(qp), P(pd), P(attr->send_cq));
	return qp;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	record("ibv_destroy_qp qp=%lx\n", P(qp));
	return freed(__func__, REAL(ibv_destroy_qp)(qp));
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (mask & IBV_QP_STATE)
		record("ibv_modify_qp qp=%lx state=%x\n", P(qp), attr->qp_state);
	return REAL(ibv_modify_qp)(qp, attr, mask);
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = REAL(ibv_alloc_pd)(context);

	if (pd)
		record("ibv_alloc_pd pd=%lx\n", P(pd));
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	record("ibv_dealloc_pd pd=%lx\n", P(pd));
	return freed(__func__, REAL(ibv_dealloc_pd)(pd));
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access)
{
	struct ibv_mr *mr = REAL(ibv_reg_mr)(pd, addr, len, access);

	if (mr)
		record("ibv_reg_mr mr=%lx pd=%lx\n", P(mr), P(pd));
	return mr;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	record("ibv_dereg_mr mr=%lx\n", P(mr));
	return freed(__func__, REAL(ibv_dereg_mr)(mr));
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct ibv_comp_channel *comp = REAL(ibv_create_comp_channel)(context);

	if (comp)
		record("ibv_create_comp_channel comp=%lx\n", P(comp));
	return comp;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *comp)
{
	record("ibv_destroy_comp_channel comp=%lx\n", P(comp));
	return freed(__func__, REAL(ibv_destroy_comp_channel)(comp));
}

int ibv_get_cq_event(struct ibv_comp_channel *comp, struct ibv_cq **cq, void **context)
{
	int ret = REAL(ibv_get_cq_event)(comp, cq, context);

	if (ret == 0)
		record("ibv_get_cq_event cq=%lx\n", P(*cq));
	return ret;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
	record("ibv_ack_cq_events cq=%lx count=%x\n", P(cq), n);
	REAL(ibv_ack_cq_events)(cq, n);
}

// What verbs.h calls through the context's ops is replaced there, before the
// device's first completion queue is made. The real ones stay in hooked.

static pthread_mutex_t hooking = PTHREAD_MUTEX_INITIALIZER;
static struct {
	struct ibv_context *context;
	struct ibv_context_ops ops;
} hooked[8];

static struct ibv_context_ops *ops_of(struct ibv_context *context)
{
	size_t i;

	for (i = 0; i < sizeof(hooked) / sizeof(hooked[0]); i++)
		if (hooked[i].context == context)
			return &hooked[i].ops;
	give_up("a device that is not known");
	return NULL;
}

static int recorded_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	int i, got = ops_of(cq->context)->poll_cq(cq, n, wc);

	for (i = 0; i < got; i++)
		record("ibv_poll_cq cq=%lx wr=%lx status=%x\n", P(cq), (unsigned long)wc[i].wr_id, wc[i].status);
	return got;
}

// Two threads may post to one queue at the same time: the record has to have their
// order.
static pthread_mutex_t posting = PTHREAD_MUTEX_INITIALIZER;

static int recorded_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct ibv_send_wr *w;
	int ret;

	pthread_mutex_lock(&posting);
	for (w = wr; w; w = w->next)
		record("ibv_post_send qp=%lx wr=%lx signaled=%x\n", P(qp), (unsigned long)w->wr_id, !!(w->send_flags & IBV_SEND_SIGNALED));
	*bad = NULL; // siw may fail and not set it
	ret = ops_of(qp->context)->post_send(qp, wr, bad);
	for (w = ret ? *bad : NULL; w; w = w->next)
		record("refused qp=%lx wr=%lx\n", P(qp), (unsigned long)w->wr_id);
	pthread_mutex_unlock(&posting);
	return ret;
}

static int recorded_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct ibv_recv_wr *w;
	int ret;

	pthread_mutex_lock(&posting);
	for (w = wr; w; w = w->next)
		record("ibv_post_recv qp=%lx wr=%lx\n", P(qp), (unsigned long)w->wr_id);
	*bad = NULL; // siw may fail and not set it
	ret = ops_of(qp->context)->post_recv(qp, wr, bad);
	for (w = ret ? *bad : NULL; w; w = w->next)
		record("refused qp=%lx wr=%lx\n", P(qp), (unsigned long)w->wr_id);
	pthread_mutex_unlock(&posting);
	return ret;
}

static void hook(struct ibv_context *context)
{
	size_t i;

	pthread_mutex_lock(&hooking);
	if (context->ops.poll_cq != recorded_poll_cq) {
		for (i = 0; hooked[i].context && hooked[i].context != context; i++)
			if (i + 1 == sizeof(hooked) / sizeof(hooked[0]))
				give_up("too many devices");
		hooked[i].ops = context->ops;
		hooked[i].context = context;
		context->ops.poll_cq = recorded_poll_cq;
		context->ops.post_send = recorded_post_send;
		context->ops.post_recv = recorded_post_recv;
	}
	pthread_mutex_unlock(&hooking);
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *comp, int vector)
{
	struct ibv_cq *cq = REAL(ibv_create_cq)(context, cqe, cq_context, comp, vector);

	hook(context);
	if (cq)
		record("ibv_create_cq cq=%lx comp=%lx\n", P(cq), P(comp));
	return cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	record("ibv_destroy_cq cq=%lx\n", P(cq));
	return freed(__func__, REAL(ibv_destroy_cq)(cq));
}
