// Package badlink is a bad network between two processes on one machine. It has a round-trip time,
// loses packets, has little bandwidth, is cut in one or both directions, and forgets connections.
// Every connection across it is one kernel TCP connection from end to end.
//
// [Apart] moves the whole program into its own network namespace, "here", which ends with the
// program's last process, however that ends. So the machine's own network is never touched, and
// nothing can be left behind. [New] creates a second namespace, "between", which is a router, and
// two veth pairs to it. A packet to an address of the link leaves here through one pair, crosses
// between, and returns through the other:
//
//	        here                                   between                                  here
//	client ──── near ═══════ veth ═══════ near ── delay (tun) ── far ═══════ veth ═══════ far ──── server
//	        source becomes                     loss, drops: nftables                  destination becomes
//	        the link's own                     rate: tbf on near and far              127.0.0.1:port
//
// Both ends are on this machine, so here translates addresses (also with nftables): otherwise the
// kernel would deliver such packets locally. Between translates nothing. Processes need not be
// moved, and only need to know an address. No process relays: a relay would terminate TCP on either
// side of the link, and then its sockets, not those of the processes under test, would detect that
// a peer is gone.
//
// Loss, drops and rate are the kernel's. The delay is not: the kernel's would be netem, which not
// every kernel has. The router sends every packet through a tun device, where this program holds it
// for half the round-trip time and writes it back unchanged. Packets are dropped behind that
// device, where each is at most one MTU, and not here, where the sockets are: a kernel reports to
// the sender the packets that it drops itself.
package badlink
