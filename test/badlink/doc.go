// Package badlink is a bad network between two processes of one machine: it has a round-trip time, loses packets, is narrow, is cut in one or both
// directions, and forgets connections. What crosses it is one TCP connection of the kernel's from end to end.
//
// [Apart] moves the whole program into a network namespace of its own, "here", which ends with the program's last process, however that ends. So the
// machine's own network is never touched, and nothing can be left behind. [New] makes a second namespace, "between", which is a router, and two veth
// pairs to it. What is sent to an address of the link leaves here by one pair, crosses between, and comes back by the other:
//
//	        here                                   between                                  here
//	client ──── near ═══════ veth ═══════ near ── delay (tun) ── far ═══════ veth ═══════ far ──── server
//	        source becomes                     loss, drops: nftables                  destination becomes
//	        the link's own                     rate: tbf on near and far              127.0.0.1:port
//
// Both ends are on this machine, so here translates addresses (nftables again): the kernel would otherwise keep such packets to itself. Between
// translates nothing. Processes need not be moved or told anything but an address, and none of them relays: a relay would end TCP on either side
// of the link, and then its sockets, not those of the processes under test, would find out that a peer is gone.
//
// Loss, drops and rate are the kernel's. The delay is not: the kernel's would be netem, which not every kernel has. The router sends every packet
// through a tun device, where this program holds it for half the round-trip time and writes it back unchanged. Packets are dropped behind that
// device, where each is of at most one MTU, and not here, where the sockets are: a sender is told of what its own kernel drops.
package badlink
