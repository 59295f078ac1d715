// shim.c: rdma-core, opened with dlopen(3), and the loops over work requests.
//go:build cgo && linux

#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Every function that is called by name: result, name, parameters.
#define RDMACM(X)                                                                                       \
	X(struct rdma_event_channel *, rdma_create_event_channel, (void))                                   \
	X(void, rdma_destroy_event_channel, (struct rdma_event_channel *))                                  \
	X(int, rdma_get_cm_event, (struct rdma_event_channel *, struct rdma_cm_event **))                   \
	X(int, rdma_ack_cm_event, (struct rdma_cm_event *))                                                 \
	X(int, rdma_create_id, (struct rdma_event_channel *, struct rdma_cm_id **, void *, int))            \
	X(int, rdma_destroy_id, (struct rdma_cm_id *))                                                      \
	X(int, rdma_bind_addr, (struct rdma_cm_id *, struct sockaddr *))                                    \
	X(int, rdma_listen, (struct rdma_cm_id *, int))                                                     \
	X(int, rdma_resolve_addr, (struct rdma_cm_id *, struct sockaddr *, struct sockaddr *, int))         \
	X(int, rdma_resolve_route, (struct rdma_cm_id *, int))                                              \
	X(int, rdma_connect, (struct rdma_cm_id *, struct rdma_conn_param *))                               \
	X(int, rdma_accept, (struct rdma_cm_id *, struct rdma_conn_param *))                                \
	X(int, rdma_reject, (struct rdma_cm_id *, const void *, uint8_t))                                   \
	X(int, rdma_disconnect, (struct rdma_cm_id *))                                                      \
	X(int, rdma_migrate_id, (struct rdma_cm_id *, struct rdma_event_channel *))                         \
	X(int, rdma_set_option, (struct rdma_cm_id *, int, int, void *, size_t))                            \
	X(int, rdma_create_qp, (struct rdma_cm_id *, struct ibv_pd *, struct ibv_qp_init_attr *))           \
	X(struct ibv_context **, rdma_get_devices, (int *))                                                 \
	X(void, rdma_free_devices, (struct ibv_context **))

#define IBVERBS(X)                                                                                      \
	X(struct ibv_device **, ibv_get_device_list, (int *))                                               \
	X(void, ibv_free_device_list, (struct ibv_device **))                                               \
	X(struct ibv_context *, ibv_open_device, (struct ibv_device *))                                     \
	X(int, ibv_close_device, (struct ibv_context *))                                                    \
	X(int, ibv_query_device, (struct ibv_context *, struct ibv_device_attr *))                          \
	X(int, ibv_query_port, (struct ibv_context *, uint8_t, struct ibv_port_attr *))                     \
	X(int, ibv_query_gid, (struct ibv_context *, uint8_t, int, union ibv_gid *))                        \
	X(struct ibv_pd *, ibv_alloc_pd, (struct ibv_context *))                                            \
	X(int, ibv_dealloc_pd, (struct ibv_pd *))                                                           \
	X(struct ibv_mr *, ibv_reg_mr, (struct ibv_pd *, void *, size_t, int))                              \
	X(int, ibv_dereg_mr, (struct ibv_mr *))                                                             \
	X(struct ibv_comp_channel *, ibv_create_comp_channel, (struct ibv_context *))                       \
	X(int, ibv_destroy_comp_channel, (struct ibv_comp_channel *))                                       \
	X(struct ibv_cq *, ibv_create_cq, (struct ibv_context *, int, void *, struct ibv_comp_channel *, int)) \
	X(int, ibv_destroy_cq, (struct ibv_cq *))                                                           \
	X(int, ibv_get_cq_event, (struct ibv_comp_channel *, struct ibv_cq **, void **))                    \
	X(void, ibv_ack_cq_events, (struct ibv_cq *, unsigned int))                                         \
	X(struct ibv_qp *, ibv_create_qp, (struct ibv_pd *, struct ibv_qp_init_attr *))                     \
	X(int, ibv_destroy_qp, (struct ibv_qp *))                                                           \
	X(int, ibv_modify_qp, (struct ibv_qp *, struct ibv_qp_attr *, int))

#define DECLARE(result, name, parameters) static result(*name) parameters;
RDMACM(DECLARE)
IBVERBS(DECLARE)

// The libraries are never closed: drivers that they load don't expect it.
const char *rn_load(void)
{
	static int loaded;
	void *cm, *verbs;

	if (loaded)
		return NULL;
	verbs = dlopen("libibverbs.so.1", RTLD_NOW);
	if (!verbs)
		return dlerror();
	cm = dlopen("librdmacm.so.1", RTLD_NOW);
	if (!cm)
		return dlerror();
#define RESOLVE_IN(library, name)                      \
	*(void **)&name = dlsym(library, #name);           \
	if (!name)                                         \
		return dlerror();
#define RESOLVE_CM(result, name, parameters) RESOLVE_IN(cm, name)
#define RESOLVE_VERBS(result, name, parameters) RESOLVE_IN(verbs, name)
	RDMACM(RESOLVE_CM)
	IBVERBS(RESOLVE_VERBS)
	loaded = 1;
	return NULL;
}

// failed turns the librdmacm convention (-1 and errno) into ours.
static int failed(int ret)
{
	if (ret >= 0)
		return 0;
	return errno ? -errno : -EIO;
}

// failed_ptr is for what returns a pointer, and NULL and errno.
static int failed_ptr(void *p)
{
	if (p)
		return 0;
	return errno ? -errno : -EIO;
}

// failed_errno is for what returns 0 or an errno, which a few drivers negate,
// and for what returns -1 and errno.
static int failed_errno(int ret)
{
	if (ret == 0)
		return 0;
	if (ret == -1)
		return errno ? -errno : -EIO;
	return ret < 0 ? ret : -ret;
}

struct ibv_device **rn_get_device_list(int *n)
{
	return ibv_get_device_list(n);
}

void rn_free_device_list(struct ibv_device **list)
{
	ibv_free_device_list(list);
}

int rn_open_device(struct ibv_device *dev, struct ibv_context **ctx)
{
	errno = 0;
	*ctx = ibv_open_device(dev);
	return failed_ptr(*ctx);
}

void rn_close_device(struct ibv_context *ctx)
{
	ibv_close_device(ctx);
}

int rn_query_device(struct ibv_context *ctx, struct ibv_device_attr *attr)
{
	return failed_errno(ibv_query_device(ctx, attr));
}

int rn_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr)
{
	memset(attr, 0, sizeof(*attr));
	return failed_errno(ibv_query_port(ctx, port, attr));
}

int rn_query_gid(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid)
{
	return failed_errno(ibv_query_gid(ctx, port, index, gid));
}

// rn_probe_inline finds how much inline data a queue pair can have, which no
// query tells, by making some. It returns less than 0 if none can be made now.
int rn_probe_inline(struct ibv_context *ctx)
{
	static const int sizes[] = {1024, 512, 256, 220, 128, 64, 32, 0};
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 2, NULL, NULL, 0);
	int granted = -1;
	size_t i;

	for (i = 0; pd && cq && i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
		struct ibv_qp *qp;

		attr.cap = (struct ibv_qp_cap){1, 1, 1, 1, sizes[i]};
		qp = ibv_create_qp(pd, &attr);
		if (qp) {
			granted = attr.cap.max_inline_data;
			ibv_destroy_qp(qp);
			break;
		}
	}
	if (cq)
		ibv_destroy_cq(cq);
	if (pd)
		ibv_dealloc_pd(pd);
	return granted;
}

// librdmacm closes a removed device when its last id is gone, whatever else was
// made of it. This keeps the devices open.
struct ibv_context **rn_pin_devices(void)
{
	return rdma_get_devices(NULL);
}

void rn_unpin_devices(struct ibv_context **list)
{
	if (list)
		rdma_free_devices(list);
}

// rn_let_go closes for the kernel a device of which nothing is used any more. Its
// descriptors stay librdmacm's to close, and lead nowhere.
void rn_let_go(struct ibv_context *ctx)
{
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	if (null < 0)
		return;
	dup3(null, ctx->cmd_fd, O_CLOEXEC);
	dup3(null, ctx->async_fd, O_CLOEXEC);
	close(null);
}

int rn_create_event_channel(struct rdma_event_channel **ch)
{
	errno = 0;
	*ch = rdma_create_event_channel();
	return failed_ptr(*ch);
}

void rn_destroy_event_channel(struct rdma_event_channel *ch)
{
	ch->fd = -1;
	rdma_destroy_event_channel(ch);
}

// min_rnr_timer, which rdma_cm leaves at 0, meaning 655 ms. 8 means 0.16 ms.
static void set_min_rnr_timer(struct rdma_cm_id *id)
{
	struct ibv_qp_attr attr;

	if (!id->qp || id->verbs->device->transport_type != IBV_TRANSPORT_IB)
		return;
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_RTS;
	attr.min_rnr_timer = 8;
	ibv_modify_qp(id->qp, &attr, IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER); // a slower retry, if it fails
}

int rn_get_event(struct rdma_event_channel *ch, struct rn_event *out)
{
	struct rdma_cm_event *ev;
	int ret;

	do {
		errno = 0;
		ret = rdma_get_cm_event(ch, &ev);
	} while (ret && errno == EINTR);
	if (ret)
		return failed(ret);
	out->type = ev->event;
	out->status = ev->status;
	out->id = ev->id;
	out->context = (uint64_t)(uintptr_t)(ev->event == RDMA_CM_EVENT_CONNECT_REQUEST ? ev->listen_id : ev->id)->context;
	out->private_data_len = 0;
	switch (ev->event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
	case RDMA_CM_EVENT_REJECTED:
	case RDMA_CM_EVENT_ESTABLISHED:
		if (ev->param.conn.private_data) {
			out->private_data_len = ev->param.conn.private_data_len;
			memcpy(out->private_data, ev->param.conn.private_data, out->private_data_len);
		}
	}
	out->reads = 0;
	if (ev->event == RDMA_CM_EVENT_ESTABLISHED) {
		out->reads = ev->param.conn.responder_resources;
		set_min_rnr_timer(ev->id);
	}
	rdma_ack_cm_event(ev);
	return 0;
}

int rn_create_id(struct rdma_event_channel *ch, uint64_t context, struct rdma_cm_id **id)
{
	errno = 0;
	return failed(rdma_create_id(ch, id, (void *)(uintptr_t)context, RDMA_PS_TCP));
}

void rn_set_context(struct rdma_cm_id *id, uint64_t context)
{
	id->context = (void *)(uintptr_t)context;
}

int rn_destroy_id(struct rdma_cm_id *id)
{
	errno = 0;
	return failed(rdma_destroy_id(id));
}

int rn_bind_addr(struct rdma_cm_id *id, void *addr)
{
	errno = 0;
	return failed(rdma_bind_addr(id, addr));
}

int rn_listen(struct rdma_cm_id *id, int backlog)
{
	errno = 0;
	return failed(rdma_listen(id, backlog));
}

int rn_resolve_addr(struct rdma_cm_id *id, void *src, void *dst, int ms)
{
	errno = 0;
	return failed(rdma_resolve_addr(id, src, dst, ms));
}

int rn_resolve_route(struct rdma_cm_id *id, int ms)
{
	errno = 0;
	return failed(rdma_resolve_route(id, ms));
}

static struct rdma_conn_param conn_param(void *data, uint8_t len, uint8_t resources, uint8_t depth, uint8_t retry, uint8_t rnr_retry)
{
	return (struct rdma_conn_param){
		.private_data = data,
		.private_data_len = len,
		.responder_resources = resources,
		.initiator_depth = depth,
		.flow_control = 1,
		.retry_count = retry,
		.rnr_retry_count = rnr_retry,
	};
}

// A signal must not interrupt what can't be begun a second time: siw connects a
// TCP socket in here.
static void block_signals(sigset_t *old)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, old);
}

int rn_connect(struct rdma_cm_id *id, void *data, uint8_t len, uint8_t resources, uint8_t depth, uint8_t retry, uint8_t rnr_retry)
{
	struct rdma_conn_param p = conn_param(data, len, resources, depth, retry, rnr_retry);
	sigset_t old;
	int ret;

	block_signals(&old);
	errno = 0;
	ret = failed(rdma_connect(id, &p));
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return ret;
}

int rn_accept(struct rdma_cm_id *id, void *data, uint8_t len, uint8_t resources, uint8_t depth, uint8_t retry, uint8_t rnr_retry)
{
	struct rdma_conn_param p = conn_param(data, len, resources, depth, retry, rnr_retry);
	sigset_t old;
	int ret;

	block_signals(&old);
	errno = 0;
	ret = failed(rdma_accept(id, &p));
	if (ret == 0)
		set_min_rnr_timer(id);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return ret;
}

int rn_reject(struct rdma_cm_id *id, void *data, uint8_t len)
{
	errno = 0;
	return failed(rdma_reject(id, data, len));
}

int rn_disconnect(struct rdma_cm_id *id)
{
	errno = 0;
	return failed(rdma_disconnect(id));
}

int rn_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *ch)
{
	errno = 0;
	return failed(rdma_migrate_id(id, ch));
}

int rn_set_byte(struct rdma_cm_id *id, int option, uint8_t value)
{
	errno = 0;
	return failed(rdma_set_option(id, RDMA_OPTION_ID, option, &value, sizeof(value)));
}

int rn_set_int(struct rdma_cm_id *id, int option, int value)
{
	errno = 0;
	return failed(rdma_set_option(id, RDMA_OPTION_ID, option, &value, sizeof(value)));
}

// rn_create_qp replaces *cap by what was granted.
int rn_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_qp_cap *cap)
{
	struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = *cap};
	int ret;

	errno = 0;
	ret = failed(rdma_create_qp(id, pd, &attr));
	if (ret == 0)
		*cap = attr.cap;
	return ret;
}

// rn_detach_qp and rn_destroy_qp are rdma_destroy_qp(3) in two steps.
void rn_detach_qp(struct rdma_cm_id *id)
{
	id->qp = NULL;
}

int rn_destroy_qp(struct ibv_qp *qp)
{
	return failed_errno(ibv_destroy_qp(qp));
}

int rn_alloc_pd(struct ibv_context *ctx, struct ibv_pd **pd)
{
	errno = 0;
	*pd = ibv_alloc_pd(ctx);
	return failed_ptr(*pd);
}

int rn_dealloc_pd(struct ibv_pd *pd)
{
	return failed_errno(ibv_dealloc_pd(pd));
}

int rn_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access, struct ibv_mr **mr)
{
	errno = 0;
	*mr = ibv_reg_mr(pd, addr, len, access);
	return failed_ptr(*mr);
}

int rn_dereg_mr(struct ibv_mr *mr)
{
	return failed_errno(ibv_dereg_mr(mr));
}

int rn_create_cq(struct ibv_context *ctx, int depth, struct ibv_comp_channel **ch, struct ibv_cq **cq)
{
	static unsigned int turn; // which completion vector: any value will do
	int ret, vectors = ctx->num_comp_vectors > 0 ? ctx->num_comp_vectors : 1;

	errno = 0;
	*ch = ibv_create_comp_channel(ctx);
	if (!*ch)
		return failed_ptr(*ch);
	*cq = ibv_create_cq(ctx, depth, NULL, *ch, __atomic_fetch_add(&turn, 1, __ATOMIC_RELAXED) % vectors);
	ret = failed_ptr(*cq);
	if (ret)
		ibv_destroy_comp_channel(*ch);
	return ret;
}

// rn_create_cq_alone makes one that reports no events, or returns NULL.
struct ibv_cq *rn_create_cq_alone(struct ibv_context *ctx, int depth)
{
	return ibv_create_cq(ctx, depth, NULL, NULL, 0);
}

int rn_destroy_cq(struct ibv_cq *cq)
{
	return failed_errno(ibv_destroy_cq(cq));
}

void rn_destroy_comp_channel(struct ibv_comp_channel *ch)
{
	ch->fd = -1;
	ibv_destroy_comp_channel(ch);
}

int rn_get_cq_event(struct ibv_comp_channel *ch)
{
	struct ibv_cq *cq;
	void *context;
	int ret;

	do {
		errno = 0;
		ret = ibv_get_cq_event(ch, &cq, &context);
	} while (ret && errno == EINTR);
	if (ret)
		return errno == EAGAIN ? 0 : failed(-1);
	ibv_ack_cq_events(cq, 1);
	return 1;
}

int rn_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	return cq->context->ops.poll_cq(cq, n, wc);
}

int rn_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	return failed_errno(cq->context->ops.req_notify_cq(cq, solicited_only));
}

int rn_qp_to_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_ERR;
	return failed_errno(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

struct rn_posted rn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, int n)
{
	struct ibv_send_wr *bad = NULL;
	struct rn_posted done = {n, 0};
	int i;

	for (i = 0; i < n - 1; i++)
		wr[i].next = &wr[i + 1];
	wr[n - 1].next = NULL;
	done.err = -failed_errno(qp->context->ops.post_send(qp, wr, &bad));
	// siw queues all and says no when the doorbell fails: bad is NULL then.
	if (done.err && bad)
		done.n = bad - wr;
	return done;
}

struct rn_posted rn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, int n)
{
	struct ibv_recv_wr *bad = NULL;
	struct rn_posted done = {n, 0};
	int i;

	for (i = 0; i < n - 1; i++)
		wr[i].next = &wr[i + 1];
	wr[n - 1].next = NULL;
	done.err = -failed_errno(qp->context->ops.post_recv(qp, wr, &bad));
	if (done.err && bad)
		done.n = bad - wr;
	return done;
}

int rn_post_probe(struct ibv_qp *qp, int opcode, uint64_t wr_id)
{
	struct ibv_sge none = {0}; // siw wants one of a READ
	struct ibv_send_wr wr, *bad;

	memset(&wr, 0, sizeof(wr));
	wr.wr_id = wr_id;
	wr.opcode = opcode;
	wr.send_flags = IBV_SEND_SIGNALED;
	if (opcode == IBV_WR_RDMA_READ) {
		wr.sg_list = &none;
		wr.num_sge = 1;
	}
	return failed_errno(qp->context->ops.post_send(qp, &wr, &bad));
}
