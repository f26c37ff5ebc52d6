// Package abuse attacks the agent as one tenant of the hub, who may have many Clusters, and
// measures the effect on another tenant's claims.
//
// It starts a sandbox without a shim: real etcd, API server, Cluster API and agents. The victim is
// the sandbox's own Cluster. It keeps a few claims with machines, and makes and releases further
// claims in a steady trickle, as its shim would. The attackers are ordinary Clusters in the same
// namespace. Each has its own certificate and node group, and a signed certificate without rights.
// It uses no certificate for attacks that precede authentication.
//
// All attackers carry out the same attack at once, and each uses all that its identity may have.
// What the agent does not limit for an identity, such as connections without one, has the same
// strength whatever their number.
//
// In one run each attack alternates with rest, so that other load on the machine affects both
// alike. The run judges four things: how much slower the victim is during the attack than between
// attacks, how far the agent's memory and etcd grow, whether the victim has lost anything, and
// whether the attackers are served again once they behave.
//
// The attackers stand for other machines. They run on the same processors as the hub, so all of
// them are one separate process that uses at most one processor, at the lowest priority. Most of
// its requests are encoded once and sent repeatedly. Each attacker connects from another loopback
// address, so that they do not use up the victim's ports. The work that they cause in the agent,
// the API server and etcd is not restricted in any way.
package abuse
