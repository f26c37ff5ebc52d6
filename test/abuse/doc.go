// Package abuse attacks the agent as one tenant of the hub, while another tenant's claims are measured.
//
// It brings a sandbox up without a shim: real etcd, API server, Cluster API and agents. The victim is the sandbox's own Cluster: it keeps a few
// claims with machines, and makes and releases further ones in a steady trickle, as its shim would. The attacker is an ordinary tenant: it has the
// certificate of another Cluster in the same namespace, one that is signed and has no right, and for what comes before any authentication
// none. Each attack takes turns with rest, in one run, so that whatever else the machine does hits both alike; what is judged is how much slower
// the victim is during the attack than between, what the agent's memory and etcd grow to, and that neither the victim has lost anything nor
// the attacker stays shut out once it behaves.
//
// The attacker stands for another machine. As it runs on the same processors as the hub, it is a process of its own that uses one processor
// at most, and only what the others leave of it: its priority is the lowest. Most of its requests are encoded once and sent over and over. It
// connects from another loopback address, so that the ports that it uses up are not the victim's. What the agent, the API server and etcd do because
// of it is not held back in any way.
package abuse
