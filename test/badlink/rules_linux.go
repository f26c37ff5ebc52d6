package badlink

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// register of nftables that expressions hand values over in; a second one where two are needed.
const (
	register = unix.NFT_REG_1
	second   = unix.NFT_REG_2
)

// rule is what a packet has to be like, and what becomes of it then.
type rule []expr.Any

func when(matches ...[]expr.Any) rule {
	var r rule
	for _, m := range matches {
		r = append(r, m...)
	}
	return r
}

func (r rule) then(actions ...expr.Any) rule { return append(r, actions...) }

func (r rule) countAndDrop() rule {
	return r.then(&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop})
}

func equals(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: data} }

func arrivesBy(device string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: register}, equals(ifname(device))}
}

func leavesBy(device string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: register}, equals(ifname(device))}
}

// ifname is a name as the kernel compares it.
func ifname(device string) []byte {
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, device)
	return name
}

// Where the addresses are in an IPv4 header, and the destination port in a TCP header.
const (
	sourceAt      = 12
	destinationAt = 16
	portAt        = 2
)

func isFrom(address netip.Addr) []expr.Any { return hasAddress(sourceAt, address) }

func isTo(address netip.Addr) []expr.Any { return hasAddress(destinationAt, address) }

func hasAddress(offset uint32, address netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}, equals(address.AsSlice()),
	}
}

func isToPort(port uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register}, equals([]byte{unix.IPPROTO_TCP}),
		&expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: portAt, Len: 2}, equals(binaryutil.BigEndian.PutUint16(port)),
	}
}

// byChance matches so many of a hundred packets.
func byChance(percent float64) []expr.Any {
	const of = 1_000_000
	return []expr.Any{
		&expr.Numgen{Register: register, Modulus: of, Type: unix.NFT_NG_RANDOM},
		// The kernel compares bytes.
		&expr.Byteorder{SourceRegister: register, DestRegister: register, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpLt, Register: register, Data: binary.BigEndian.AppendUint32(nil, uint32(percent/100*of))},
	}
}

// isMarked matches packets of connections with a mark. Those that were never marked have zero.
func isMarked(mark uint32) []expr.Any {
	return []expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: register}, equals(binaryutil.NativeEndian.PutUint32(mark))}
}

// markWith marks a packet's connection.
func markWith(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: register, Data: binaryutil.NativeEndian.PutUint32(mark)},
		&expr.Ct{Key: expr.CtKeyMARK, Register: register, SourceRegister: true},
	}
}

// sendTo changes a connection's destination.
func sendTo(to netip.AddrPort) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: register, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: second, Data: binaryutil.BigEndian.PutUint16(to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: register, RegProtoMin: second},
	}
}

// comeFrom changes a connection's source.
func comeFrom(from netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: register, Data: from.AsSlice()},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: register},
	}
}

// chain is where rules are asked.
type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
	rules    []rule
}

var table = &nftables.Table{Name: "badlink", Family: nftables.TableFamilyIPv4}

// replaceRules has a namespace ask these rules instead of those that it was given before, all at one moment. Zero is the program's own namespace.
func replaceRules(namespace int, chains ...chain) error {
	conn, err := nftables.New(nftables.WithNetNSFd(namespace))
	if err != nil {
		return err
	}
	conn.AddTable(table) // there has to be one to delete
	conn.DelTable(table)
	conn.AddTable(table)
	for _, c := range chains {
		made := conn.AddChain(&nftables.Chain{Name: c.name, Table: table, Type: c.kind, Hooknum: c.hook, Priority: c.priority})
		for _, r := range c.rules {
			conn.AddRule(&nftables.Rule{Table: table, Chain: made, Exprs: r})
		}
	}
	return conn.Flush()
}

// counted returns how many packets the rules of a chain have counted.
func counted(namespace int, of string) (packets uint64, err error) {
	conn, err := nftables.New(nftables.WithNetNSFd(namespace))
	if err != nil {
		return 0, err
	}
	rules, err := conn.GetRules(table, &nftables.Chain{Name: of, Table: table})
	if err != nil {
		return 0, fmt.Errorf("counting packets: %w", err)
	}
	for _, r := range rules {
		for _, e := range r.Exprs {
			if c, ok := e.(*expr.Counter); ok {
				packets += c.Packets
			}
		}
	}
	return packets, nil
}
