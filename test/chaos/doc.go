// Package chaos runs the product on real control planes while its dependencies are made to fail,
// and counts forbidden outcomes: Machines that leaked, were claimed twice, or were taken from their
// owner, and node groups that do not come to rest.
//
// It starts a sandbox whose agents reach the hub through the proxies of package faults. Claims are
// made and released over gRPC, as many spokes would; one scenario uses real Karpenter. A separate
// connection without a proxy audits every deletion of a Machine as it happens (package invariants).
// Once the faults are over, everything must come to rest within two minutes, with exactly the
// machines that users and holders of claims own.
package chaos
