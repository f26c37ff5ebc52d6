// Package client calls an agent.
//
// [New] returns a [Client] at once, whether or not the agent can be reached: connections are made
// when calls need them. Its services are the generated gRPC clients, with what every caller of an
// agent needs added underneath:
//
//   - mutual TLS from files that may be replaced at any time, a unix socket, or plaintext on loopback;
//   - keepalive, so that a dead network is noticed even without calls;
//   - a deadline for unary calls that have none ([Options.Timeout]);
//   - a few quick retries of unary calls that found the agent unavailable. Every retried call is
//     idempotent;
//   - a request ID in the metadata of each call ([RequestIDKey]), which the agent logs and which
//     errors carry ([RequestID]).
//
// Errors are gRPC statuses; package agenterrors reads them.
//
// [Client.MirrorNodeGroups], [Client.MirrorClaims] and [Client.MirrorMachines] keep a complete
// local copy of what the agent streams, across reconnections and restarts of the agent. When the
// certificate is replaced, or the agent ends a connection because of its age, they move to the next
// connection without a gap.
//
// # What is written by hand
//
// The mirror: client-go's reflector lists and watches Kubernetes objects by resource versions,
// which these streams do not have. The deadline, the log and the repetition of throttled calls:
// they wrap any connection that [FromConn] is given, to which the interceptors of
// go-grpc-middleware cannot be added, and they wait as long as the agent's RetryInfo asks, which
// neither its retries nor gRPC's do. The other retries are gRPC's own; only its service config is
// declared here, because grpc-go has no types for it.
package client
