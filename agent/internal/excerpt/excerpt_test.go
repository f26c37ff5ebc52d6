package excerpt_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/excerpt"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// names are the needed fields of a NodeGroupDeleteNodesRequest whose nodes need only their names.
var names = excerpt.Fields{
	1: {Name: "nodes", Most: 3, Inside: excerpt.Fields{2: {Name: "name", Check: func(value []byte) error {
		if bytes.Equal(value, []byte("bad")) {
			return errors.New("is bad")
		}
		return nil
	}}}},
	2: {Name: "id"},
}

func request(names ...string) *externalgrpc.NodeGroupDeleteNodesRequest {
	r := &externalgrpc.NodeGroupDeleteNodesRequest{Id: "a"}
	for _, name := range names {
		r.Nodes = append(r.Nodes, &externalgrpc.ExternalGrpcNode{
			ProviderID: "test://a", Name: name, Labels: map[string]string{"a": "b", "": ""}, Annotations: map[string]string{"c": "d"},
		})
	}
	return r
}

func encode(t *testing.T, message proto.Message) []byte {
	t.Helper()
	encoded, err := proto.Marshal(message)
	require.NoError(t, err)
	return encoded
}

func TestOnlyNeededFieldsAreCopied(t *testing.T) {
	encoded := protowire.AppendVarint(protowire.AppendTag(encode(t, request("x", "y")), 2, protowire.VarintType), 7)
	short, err := excerpt.Of(encoded, names)
	require.NoError(t, err)
	var left externalgrpc.NodeGroupDeleteNodesRequest
	require.NoError(t, proto.Unmarshal(short, &left))
	require.Empty(t, left.ProtoReflect().GetUnknown())
	require.True(t, proto.Equal(&left, &externalgrpc.NodeGroupDeleteNodesRequest{
		Id: "a", Nodes: []*externalgrpc.ExternalGrpcNode{{Name: "x"}, {Name: "y"}},
	}), "%v", &left)
}

func TestTooManyValuesAndRejectedOnesAreNamed(t *testing.T) {
	for says, given := range map[string][]string{"nodes: must have at most 3 elements": {"a", "b", "c", "d"}, "nodes.name: is bad": {"a", "bad"}} {
		_, err := excerpt.Of(encode(t, request(given...)), names)
		require.EqualError(t, err, says)
	}
}

func TestWhatIsNoMessageIsAnError(t *testing.T) {
	encoded := encode(t, request("x"))
	failed := 0
	for length := range encoded {
		if _, err := excerpt.Of(encoded[:length], names); err != nil {
			require.ErrorIs(t, err, excerpt.ErrMalformed)
			failed++
		}
	}
	require.Positive(t, failed)
}

// What is dropped costs nothing, however much there is of it.
func TestWhatIsNotNeededCostsNothing(t *testing.T) {
	bomb := bytes.Repeat(protowire.AppendBytes(protowire.AppendTag(nil, 9, protowire.BytesType), nil), 1<<20)
	require.Zero(t, testing.AllocsPerRun(3, func() {
		short, err := excerpt.Of(bomb, names)
		if len(short) > 0 || err != nil {
			panic("not dropped")
		}
	}))
}

func FuzzOf(f *testing.F) {
	f.Add([]byte{0x0a, 0x02, 0x12, 0x00})
	f.Fuzz(func(t *testing.T, encoded []byte) {
		short, err := excerpt.Of(encoded, names)
		require.LessOrEqual(t, len(short), len(encoded))
		if err == nil && len(short) > 0 {
			again, err := excerpt.Of(short, names)
			require.NoError(t, err)
			require.Equal(t, short, again)
		}
	})
}
