// shim.h: the calls that Go makes. Each returns 0 or more for success, and
// -errno for failure, unless it says otherwise. None blocks but in the kernel's
// own short control calls.
//go:build cgo && linux

#ifndef RDMANET_SHIM_H
#define RDMANET_SHIM_H

#include "abi.h"

// rn_load opens the two libraries, once. It returns NULL, or what dlerror says.
const char *rn_load(void);

// Devices.
struct ibv_device **rn_get_device_list(int *n);
void rn_free_device_list(struct ibv_device **list);
int rn_open_device(struct ibv_device *dev, struct ibv_context **ctx);
void rn_close_device(struct ibv_context *ctx);
int rn_query_device(struct ibv_context *ctx, struct ibv_device_attr *attr);
int rn_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr);
int rn_query_gid(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid);
int rn_probe_inline(struct ibv_context *ctx);
struct ibv_context **rn_pin_devices(void);
void rn_unpin_devices(struct ibv_context **list);
void rn_let_go(struct ibv_context *ctx);

// Connection manager.
struct rn_event {
	int type;
	int status;
	uint64_t context;        // of the id; of the listener for CONNECT_REQUEST
	struct rdma_cm_id *id;   // for CONNECT_REQUEST, the new id
	int reads;               // for ESTABLISHED, RDMA READs that the peer answers at a time
	int private_data_len;
	uint8_t private_data[256];
};
int rn_create_event_channel(struct rdma_event_channel **ch);
void rn_destroy_event_channel(struct rdma_event_channel *ch); // whose fd is closed already
int rn_get_event(struct rdma_event_channel *ch, struct rn_event *ev); // gets and acks
int rn_create_id(struct rdma_event_channel *ch, uint64_t context, struct rdma_cm_id **id);
void rn_set_context(struct rdma_cm_id *id, uint64_t context);
int rn_destroy_id(struct rdma_cm_id *id);
int rn_bind_addr(struct rdma_cm_id *id, void *addr);
int rn_listen(struct rdma_cm_id *id, int backlog);
int rn_resolve_addr(struct rdma_cm_id *id, void *src, void *dst, int ms);
int rn_resolve_route(struct rdma_cm_id *id, int ms);
int rn_connect(struct rdma_cm_id *id, void *data, uint8_t len, uint8_t resources, uint8_t depth, uint8_t retry, uint8_t rnr_retry);
int rn_accept(struct rdma_cm_id *id, void *data, uint8_t len, uint8_t resources, uint8_t depth, uint8_t retry, uint8_t rnr_retry);
int rn_reject(struct rdma_cm_id *id, void *data, uint8_t len);
int rn_disconnect(struct rdma_cm_id *id);
int rn_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *ch);
int rn_set_byte(struct rdma_cm_id *id, int option, uint8_t value); // of level RDMA_OPTION_ID
int rn_set_int(struct rdma_cm_id *id, int option, int value);
int rn_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_qp_cap *cap);
void rn_detach_qp(struct rdma_cm_id *id);
int rn_destroy_qp(struct ibv_qp *qp);

// Verbs.
int rn_alloc_pd(struct ibv_context *ctx, struct ibv_pd **pd);
int rn_dealloc_pd(struct ibv_pd *pd);
int rn_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access, struct ibv_mr **mr);
int rn_dereg_mr(struct ibv_mr *mr);
int rn_create_cq(struct ibv_context *ctx, int depth, struct ibv_comp_channel **ch, struct ibv_cq **cq);
struct ibv_cq *rn_create_cq_alone(struct ibv_context *ctx, int depth);
int rn_destroy_cq(struct ibv_cq *cq);
void rn_destroy_comp_channel(struct ibv_comp_channel *ch); // whose fd is closed already
int rn_get_cq_event(struct ibv_comp_channel *ch); // gets and acks; 0 if there is none
int rn_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int rn_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int rn_qp_to_error(struct ibv_qp *qp);

// What a post took, and why not the rest.
struct rn_posted {
	int n;
	int err;
};
// rn_post_send posts an array of requests with one call of the device.
struct rn_posted rn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, int n);
struct rn_posted rn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, int n);
// rn_post_probe posts a signaled RDMA WRITE or READ of no bytes.
int rn_post_probe(struct ibv_qp *qp, int opcode, uint64_t wr_id);

#endif
