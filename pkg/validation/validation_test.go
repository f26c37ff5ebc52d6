package validation_test

import (
	"context"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"buf.build/go/protovalidate"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/validation"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func newValidator(t *testing.T) *validation.Validator {
	t.Helper()
	validator, err := validation.New()
	require.NoError(t, err)
	return validator
}

func TestCheckNamesAFieldThatIsMalformed(t *testing.T) {
	err := newValidator(t).Check(&agentv1alpha1.CreateClaimRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "fine", Name: "fine"},
		ClaimId: "fine", Holder: "karpenter", Candidates: []string{"a/b", "nothing"},
	})
	require.True(t, agenterrors.IsInvalidArgument(err))
	violations := agenterrors.FieldViolations(err)
	require.Len(t, violations, 1)
	require.Equal(t, "candidates[1]", violations[0].Field)
	require.NotEmpty(t, violations[0].Description)
}

// oneOf returns a valid SyncClaims request.
func oneOf(nodes ...*agentv1alpha1.NodeReport) *agentv1alpha1.SyncClaimsRequest {
	return &agentv1alpha1.SyncClaimsRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "a", Name: "b"}, Holder: "karpenter", Token: "token", Nodes: nodes,
	}
}

func TestCheckStopsAtTheFirstViolation(t *testing.T) {
	request := oneOf(slices.Repeat([]*agentv1alpha1.NodeReport{{}}, 20000)...)
	validator := newValidator(t)
	err := validator.Check(request)
	require.Equal(t, "nodes[0].provider_id", agenterrors.FieldViolations(err)[0].Field)
	require.Len(t, agenterrors.FieldViolations(err), 1)
	allocated := testing.AllocsPerRun(5, func() { _ = validator.Check(request) })
	require.Less(t, allocated, 1000.0, "each further violation costs more than that")
}

func TestTooManyElementsAreFoundWithoutDecodingThem(t *testing.T) {
	many := map[string]string{}
	for i := range 129 {
		many[strconv.Itoa(i)] = "1"
	}
	node := func(change func(*agentv1alpha1.NodeReport)) *agentv1alpha1.NodeReport {
		n := &agentv1alpha1.NodeReport{ProviderId: "test://a"}
		change(n)
		return n
	}
	fits := oneOf(slices.Repeat([]*agentv1alpha1.NodeReport{{ProviderId: "test://a"}}, 20000)...)
	for _, c := range []struct {
		name, field string
		request     *agentv1alpha1.SyncClaimsRequest
	}{
		{name: "as many as may be", request: fits},
		{name: "one more", field: "nodes", request: oneOf(append(fits.GetNodes(), fits.GetNodes()[0])...)},
		{name: "claims", field: "live_claim_ids", request: &agentv1alpha1.SyncClaimsRequest{LiveClaimIds: slices.Repeat([]string{"a"}, 50001)}},
		{
			name: "entries of a map in a list", field: "nodes[1].capacity",
			request: oneOf(fits.GetNodes()[0], node(func(n *agentv1alpha1.NodeReport) { n.Capacity = many })),
		},
		{name: "labels", field: "nodes[0].labels", request: oneOf(node(func(n *agentv1alpha1.NodeReport) { n.Labels = many }))},
	} {
		t.Run(c.name, func(t *testing.T) {
			encoded, err := proto.Marshal(c.request)
			require.NoError(t, err)
			err = newValidator(t).CheckEncoded(c.request.ProtoReflect().Descriptor(), encoded)
			if c.field == "" {
				require.NoError(t, err)
				return
			}
			require.True(t, agenterrors.IsInvalidArgument(err), "%v", err)
			require.Equal(t, c.field, agenterrors.FieldViolations(err)[0].Field)
		})
	}
}

func TestWhatCannotBeReadIsLeftToTheDecoder(t *testing.T) {
	descriptor := (&agentv1alpha1.SyncClaimsRequest{}).ProtoReflect().Descriptor()
	encoded, err := proto.Marshal(oneOf(&agentv1alpha1.NodeReport{ProviderId: "test://a", Capacity: map[string]string{"cpu": "1"}}))
	require.NoError(t, err)
	for length := range encoded {
		require.NoError(t, newValidator(t).CheckEncoded(descriptor, encoded[:length]))
	}
}

// eachRequest calls visit with every message that a call of the API can send, which are those of
// the requests and of their fields. It finds the API's files by their package.
func eachRequest(t *testing.T, visit func(message protoreflect.MessageDescriptor)) {
	t.Helper()
	seen := map[protoreflect.FullName]bool{}
	var walk func(message protoreflect.MessageDescriptor)
	walk = func(message protoreflect.MessageDescriptor) {
		if seen[message.FullName()] {
			return
		}
		seen[message.FullName()] = true
		visit(message)
		for i := range message.Fields().Len() {
			if field := message.Fields().Get(i); field.Message() != nil && !field.IsMap() {
				walk(field.Message())
			}
		}
	}
	api := agentv1alpha1.File_capi_agent_v1alpha1_claim_proto.Package()
	services := 0
	protoregistry.GlobalFiles.RangeFilesByPackage(api, func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			services++
			methods := file.Services().Get(i).Methods()
			for j := range methods.Len() {
				walk(methods.Get(j).Input())
			}
		}
		return true
	})
	require.GreaterOrEqual(t, services, 7, "services of the API")
	require.True(t, seen["capi.agent.v1alpha1.NodePoolStatus"], "a message in a request of the newest service")
}

// An unbounded list or map would be decoded whatever its size.
func TestEveryListAndMapOfARequestIsBounded(t *testing.T) {
	eachRequest(t, func(message protoreflect.MessageDescriptor) {
		for i := range message.Fields().Len() {
			field := message.Fields().Get(i)
			rules, err := protovalidate.ResolveFieldRules(field)
			require.NoError(t, err)
			switch {
			case field.IsMap():
				require.Positive(t, rules.GetMap().GetMaxPairs(), "%s has no max_pairs", field.FullName())
			case field.IsList():
				require.Positive(t, rules.GetRepeated().GetMaxItems(), "%s has no max_items", field.FullName())
			}
		}
	})
}

// What is stored, logged or sent back is counted in bytes. A length in characters alone allows four
// times as many.
func TestEveryTextOfARequestIsBoundedInBytes(t *testing.T) {
	eachRequest(t, func(message protoreflect.MessageDescriptor) {
		for i := range message.Fields().Len() {
			field := message.Fields().Get(i)
			rules, err := protovalidate.ResolveFieldRules(field)
			require.NoError(t, err)
			if field.IsMap() {
				requireBytes(t, field.MapKey(), rules.GetMap().GetKeys(), field.FullName()+" (keys)")
				requireBytes(t, field.MapValue(), rules.GetMap().GetValues(), field.FullName()+" (values)")
				continue
			}
			if field.IsList() {
				rules = rules.GetRepeated().GetItems()
			}
			requireBytes(t, field, rules, field.FullName())
		}
	})
}

// requireBytes fails if a string or bytes field has no maximum in bytes.
func requireBytes(t *testing.T, field protoreflect.FieldDescriptor, rules *validate.FieldRules, name protoreflect.FullName) {
	t.Helper()
	switch field.Kind() {
	case protoreflect.BytesKind:
		require.Positive(t, rules.GetBytes().GetMaxLen(), "%s has no max_len", name)
	case protoreflect.StringKind:
		text := rules.GetString()
		if text.GetMaxBytes() > 0 {
			return
		}
		require.Positive(t, text.GetMaxLen(), "%s has neither max_bytes nor max_len", name)
		require.True(t, onlyASCII(t, text.GetPattern()), "%s has no max_bytes, and its pattern %q allows more than ASCII", name, text.GetPattern())
	default: // a value of another kind has a size
	}
}

// onlyASCII reports whether every text that matches the pattern consists of ASCII characters.
func onlyASCII(t *testing.T, pattern string) bool {
	t.Helper()
	parsed, err := syntax.Parse(pattern, syntax.Perl)
	require.NoError(t, err)
	parts := parsed.Sub
	if parsed.Op != syntax.OpConcat || parts[0].Op != syntax.OpBeginText || parts[len(parts)-1].Op != syntax.OpEndText {
		return false // the rest of the text may be anything
	}
	var ascii func(part *syntax.Regexp) bool
	ascii = func(part *syntax.Regexp) bool {
		switch part.Op {
		case syntax.OpAnyChar, syntax.OpAnyCharNotNL:
			return false
		case syntax.OpLiteral, syntax.OpCharClass: // a class is a list of ranges
			return !slices.ContainsFunc(part.Rune, func(r rune) bool { return r > unicode.MaxASCII })
		default: // it matches what its parts match
			return !slices.ContainsFunc(part.Sub, func(sub *syntax.Regexp) bool { return !ascii(sub) })
		}
	}
	return ascii(parsed)
}

func TestPatternsThatAllowOnlyASCII(t *testing.T) {
	for pattern, want := range map[string]bool{
		"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": true, "^(abc|[0-9]+)?$": true, "^\\d+$": true,
		"": false, "[a-z]": false, "^[a-z]": false, "^a|b$": false, "^.*$": false, "^\\P{Cc}*$": false, "^[^/]+$": false, "^(a|é)$": false,
	} {
		require.Equal(t, want, onlyASCII(t, pattern), pattern)
	}
}

// What a shim sends of NodePools is accepted: it cuts messages in characters, and the label with
// the set's name is a user's to write.
func TestReportsOfNodePools(t *testing.T) {
	type request = agentv1alpha1.ReportNodePoolsRequest
	long := strings.Repeat("…", 1024)
	object := func(change func(*agentv1alpha1.AppliedObject)) *request {
		o := &agentv1alpha1.AppliedObject{Kind: "NodePool", Name: "default", Set: "fleet", Revision: "0123456789abcdef", Message: long}
		change(o)
		return &request{Objects: []*agentv1alpha1.AppliedObject{o}}
	}
	pool := func(change func(*agentv1alpha1.NodePoolStatus)) *request {
		p := &agentv1alpha1.NodePoolStatus{Name: "a.pool", Set: "Fleet_1", PricePerHour: "0.25", Message: long}
		change(p)
		return &request{NodePools: []*agentv1alpha1.NodePoolStatus{p}}
	}
	for name, test := range map[string]struct {
		request *request
		field   string
	}{
		"an object":                {object(func(*agentv1alpha1.AppliedObject) {}), ""},
		"another kind":             {object(func(o *agentv1alpha1.AppliedObject) { o.Kind = "ClusterAPINodeClass" }), ""},
		"a kind with a line":       {object(func(o *agentv1alpha1.AppliedObject) { o.Kind = "Node\nPool" }), "objects[0].kind"},
		"an object's bad name":     {object(func(o *agentv1alpha1.AppliedObject) { o.Name = "é" }), "objects[0].name"},
		"an object's bad set":      {object(func(o *agentv1alpha1.AppliedObject) { o.Set = "Fleet" }), "objects[0].set"},
		"a revision of more bytes": {object(func(o *agentv1alpha1.AppliedObject) { o.Revision = strings.Repeat("é", 64) }), "objects[0].revision"},
		"a NodePool":               {pool(func(*agentv1alpha1.NodePoolStatus) {}), ""},
		"a NodePool of no set":     {pool(func(p *agentv1alpha1.NodePoolStatus) { p.Set = "" }), ""},
		"a NodePool's bad name":    {pool(func(p *agentv1alpha1.NodePoolStatus) { p.Name = "A" }), "node_pools[0].name"},
		"a NodePool's bad set":     {pool(func(p *agentv1alpha1.NodePoolStatus) { p.Set = "é" }), "node_pools[0].set"},
		"a message of more bytes": {
			pool(func(p *agentv1alpha1.NodePoolStatus) { p.Message = strings.Repeat("\U0001F600", 1025) }), "node_pools[0].message",
		},
	} {
		t.Run(name, func(t *testing.T) {
			test.request.Cluster = &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "spoke"}
			err := newValidator(t).Check(test.request)
			if test.field == "" {
				require.NoError(t, err)
				return
			}
			require.Equal(t, test.field, agenterrors.FieldViolations(err)[0].Field)
		})
	}
}

func TestCheckAcceptsWhatItCannotJudge(t *testing.T) {
	validator := newValidator(t)
	require.NoError(t, validator.Check(nil))
	require.NoError(t, validator.Check("no message"))
	require.NoError(t, validator.Check(&agentv1alpha1.GetStatusRequest{}))
}

func TestUnaryKeepsMalformedRequestsFromTheHandler(t *testing.T) {
	interceptor := newValidator(t).Unary()
	called := 0
	handler := func(context.Context, any) (any, error) { called++; return nil, nil }
	_, err := interceptor(t.Context(), &agentv1alpha1.GetClaimRequest{}, nil, handler)
	require.True(t, agenterrors.IsInvalidArgument(err))
	require.Zero(t, called)
	_, err = interceptor(t.Context(), &agentv1alpha1.GetClaimRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "a", Name: "b"}, ClaimId: "c",
	}, nil, handler)
	require.NoError(t, err)
	require.Equal(t, 1, called)
}

// received is a stream on which one message arrives.
type received struct {
	grpc.ServerStream

	message proto.Message
}

func (r received) RecvMsg(into any) error {
	message, ok := into.(proto.Message)
	if ok {
		proto.Merge(message, r.message)
	}
	return nil
}

func TestStreamKeepsMalformedRequestsFromTheHandler(t *testing.T) {
	interceptor := newValidator(t).Stream()
	read := func(_ any, stream grpc.ServerStream) error {
		return stream.RecvMsg(&agentv1alpha1.WatchClaimsRequest{})
	}
	err := interceptor(nil, received{message: &agentv1alpha1.WatchClaimsRequest{}}, nil, read)
	require.True(t, agenterrors.IsInvalidArgument(err))
	err = interceptor(nil, received{message: &agentv1alpha1.WatchClaimsRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "a", Name: "b"},
	}}, nil, read)
	require.NoError(t, err)
}
