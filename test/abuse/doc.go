// Package abuse attacks the agent as one tenant of the hub, and measures the effect on another
// tenant's claims.
//
// It starts a sandbox without a shim: real etcd, API server, Cluster API and agents. The victim is
// the sandbox's own Cluster. It keeps a few claims with machines, and makes and releases further
// claims in a steady trickle, as its shim would. The attacker is an ordinary tenant. It has the
// certificate of another Cluster in the same namespace and a signed certificate without rights, and
// uses no certificate for attacks that precede authentication.
//
// In one run each attack alternates with rest, so that other load on the machine affects both
// alike. The run judges four things: how much slower the victim is during the attack than between
// attacks, how far the agent's memory and etcd grow, whether the victim has lost anything, and
// whether the attacker is served again once it behaves.
//
// The attacker stands for another machine. It runs on the same processors as the hub, so it is a
// separate process that uses at most one processor, at the lowest priority. Most of its requests
// are encoded once and sent repeatedly. It connects from another loopback address, so that it does
// not use up the victim's ports. The work that it causes in the agent, the API server and etcd is
// not restricted in any way.
package abuse
