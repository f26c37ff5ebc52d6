// Package client calls an agent.
//
// [New] gives a [Client] at once, whether the agent can be reached or not: connections are made, and made again, when calls
// need them. Its four services are the generated gRPC clients, with what every caller of an agent needs added underneath:
//
//   - mutual TLS from files that may be replaced at any time, a unix socket, or plaintext on loopback;
//   - keepalive, so that a dead network is noticed also while nothing is asked;
//   - a deadline for unary calls that have none ([Options.Timeout]);
//   - a few quick repetitions of unary calls that found the agent unavailable. Every repeated call is idempotent;
//   - a request id in the metadata of each call ([RequestIDKey]), which the agent logs and which errors carry
//     ([RequestID]).
//
// Errors are gRPC statuses; package agenterrors reads them.
//
// [Client.MirrorNodeGroups], [Client.MirrorClaims] and [Client.MirrorMachines] keep a complete local copy of what the agent
// knows, over reconnections and restarts of the agent.
package client
