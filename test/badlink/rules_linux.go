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

// register is the nftables register that expressions use, and second another one where two are
// needed.
const (
	register = unix.NFT_REG_1
	second   = unix.NFT_REG_2
)

// rule consists of the conditions on a packet and the resulting action.
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

// ifname returns a device name in the form that the kernel compares.
func ifname(device string) []byte {
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, device)
	return name
}

// Offsets of the addresses in an IPv4 header, and of the destination port in a TCP header.
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

// byChance matches this percentage of packets.
func byChance(percent float64) []expr.Any {
	const of = 1_000_000
	return []expr.Any{
		&expr.Numgen{Register: register, Modulus: of, Type: unix.NFT_NG_RANDOM},
		// The kernel compares bytes.
		&expr.Byteorder{SourceRegister: register, DestRegister: register, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpLt, Register: register, Data: binary.BigEndian.AppendUint32(nil, uint32(percent/100*of))},
	}
}

// isMarked matches packets of connections with the mark. Unmarked connections have the mark zero.
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

// chain is a chain of rules with its hook.
type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
	rules    []rule
}

var table = &nftables.Table{Name: "badlink", Family: nftables.TableFamilyIPv4}

// replaceRules atomically replaces all rules in a namespace. Zero is the program's own namespace.
func replaceRules(namespace int, chains ...chain) error {
	conn, err := nftables.New(nftables.WithNetNSFd(namespace))
	if err != nil {
		return err
	}
	conn.AddTable(table) // it must exist to be deleted
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

// counted returns the number of packets that the rules of a chain have counted.
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
