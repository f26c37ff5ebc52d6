package agent_test

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"buf.build/go/protovalidate"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/karpenter-capi/karpenter-capi/pkg/validation"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// worst builds the requests of a method that need the most memory, from the method's descriptor and
// the constraints of its fields. A new method or field is thus covered without a change here,
// unless its constraints are of a new kind: then the builder fails.
type worst struct {
	tb        testing.TB
	of        rpc
	namespace string
	// most is the maximum size of a request of the method in bytes.
	most      int
	validator *validation.Validator
}

// attack is a request.
type attack struct {
	name    string
	request encoded
}

// style is how fields are filled.
type style int

const (
	// smallest fills a field with the smallest legal value, and one element.
	smallest style = iota
	// numerous fills lists and maps with as many small elements as may be.
	numerous
	// longest fills lists and maps with as many long elements as may be, and strings with as many
	// bytes.
	longest
)

var styleNames = map[style]string{smallest: "small", numerous: "many", longest: "long"}

// base returns the valid request of the access matrix, for a claim of its own.
func (w worst) base(id string) protoreflect.Message {
	w.tb.Helper()
	kind, err := protoregistry.GlobalTypes.FindMessageByName(w.of.method.Input().FullName())
	require.NoError(w.tb, err)
	request := kind.New()
	require.NoError(w.tb, protojson.Unmarshal([]byte(strings.ReplaceAll(w.of.request, "$ID", id)), request.Interface()))
	return request
}

func (w worst) encode(message protoreflect.Message) encoded {
	w.tb.Helper()
	bytes, err := proto.Marshal(message.Interface())
	require.NoError(w.tb, err)
	return bytes
}

// isLegal reports whether the agent's checks accept the request.
func (w worst) isLegal(request protoreflect.Message) bool {
	bytes := w.encode(request)
	return len(bytes) <= w.most && w.validator.CheckEncoded(w.of.method.Input(), bytes) == nil && w.validator.Check(request.Interface()) == nil
}

// scope lists the fields that determine whether a call reaches its handler. They keep their values.
var scope = []protoreflect.Name{"cluster", "holder", "token", "claim_id"}

// legal returns requests that satisfy all constraints. Each variable field is filled with small and
// with long elements, alone, and together with as many other fields as the constraints allow.
func (w worst) legal() []attack {
	w.tb.Helper()
	attacks := []attack{{"valid", w.encode(w.base("legal"))}}
	fields := w.of.method.Input().Fields()
	for _, how := range []style{numerous, longest} {
		all := w.base("legal-" + styleNames[how])
		for i := range fields.Len() {
			field := fields.Get(i)
			if !variable(field) {
				continue
			}
			if field.IsList() && field.Message() != nil {
				for _, inner := range []style{smallest, numerous, longest} {
					alone := w.base(fmt.Sprintf("legal-%d-%d", i, inner))
					w.fill(alone, field, how, inner)
					require.True(w.tb, w.isLegal(alone), "%s: %s", w.of.name(), field.Name())
					attacks = append(attacks, attack{fmt.Sprintf("%s, %s elements", field.Name(), styleNames[inner]), w.encode(alone)})
				}
			} else if alone := w.base(fmt.Sprintf("legal-%d-%d", i, how)); w.fill(alone, field, how, how) && w.isLegal(alone) {
				attacks = append(attacks, attack{fmt.Sprintf("%s, %s", field.Name(), styleNames[how]), w.encode(alone)})
			}
			before := proto.Clone(all.Interface()).ProtoReflect()
			if w.fill(all, field, how, how); !w.isLegal(all) {
				all = before
			}
		}
		require.True(w.tb, w.isLegal(all))
		attacks = append(attacks, attack{"all, " + styleNames[how], w.encode(all)})
	}
	return attacks
}

// variable reports whether the size of a field's value can vary.
func variable(field protoreflect.FieldDescriptor) bool {
	for _, name := range scope {
		if field.Name() == name {
			return false
		}
	}
	switch field.Kind() {
	case protoreflect.StringKind, protoreflect.BytesKind:
		return true
	case protoreflect.MessageKind:
		return !strings.HasPrefix(string(field.Message().FullName()), "google.protobuf.")
	default:
		return false
	}
}

// fill sets a field, and reports whether it did: there may be no legal value of that style. inner
// is the style of the elements of a list of messages.
func (w worst) fill(message protoreflect.Message, field protoreflect.FieldDescriptor, how, inner style) bool {
	w.tb.Helper()
	rules, err := protovalidate.ResolveFieldRules(field)
	require.NoError(w.tb, err)
	// Room for the tags and lengths of what contains the value.
	room := w.most - proto.Size(message.Interface()) - 16
	switch {
	case field.IsMap():
		w.fillMap(message.Mutable(field).Map(), field, rules, how, room)
	case field.IsList():
		w.fillList(message.Mutable(field).List(), field, rules, how, inner, room)
	case field.Message() != nil:
		inside := message.Mutable(field).Message()
		w.fillAll(inside, how)
	default:
		value, ok := w.value(field, rules, how, 0, room)
		if !ok {
			return false
		}
		message.Set(field, value)
	}
	return true
}

func (w worst) fillAll(message protoreflect.Message, how style) {
	w.tb.Helper()
	for i := range message.Descriptor().Fields().Len() {
		if field := message.Descriptor().Fields().Get(i); variable(field) {
			w.fill(message, field, how, how)
		}
	}
}

func (w worst) fillMap(entries protoreflect.Map, field protoreflect.FieldDescriptor, rules *validate.FieldRules, how style, room int) {
	w.tb.Helper()
	most := limit(rules.GetMap().GetMaxPairs(), how, room)
	for n := range most {
		key, ok := w.value(field.MapKey(), rules.GetMap().GetKeys(), how, n, 1024)
		require.True(w.tb, ok, "%s: no keys are known that its constraints allow", field.FullName())
		value, ok := w.value(field.MapValue(), rules.GetMap().GetValues(), how, n, 1024)
		require.True(w.tb, ok, "%s: no values are known that its constraints allow", field.FullName())
		if room -= len(key.String()) + len(value.String()) + 10; room < 0 {
			return
		}
		entries.Set(key.MapKey(), value)
	}
}

func (w worst) fillList(
	list protoreflect.List, field protoreflect.FieldDescriptor, rules *validate.FieldRules, how, inner style, room int,
) {
	w.tb.Helper()
	list.Truncate(0)
	most := limit(rules.GetRepeated().GetMaxItems(), how, maxNodes)
	if field.Message() != nil {
		element := list.NewElement()
		w.fillAll(element.Message(), inner)
		size := proto.Size(element.Message().Interface())
		size += protowire.SizeTag(field.Number()) + protowire.SizeVarint(uint64(size))
		for range min(most, room/max(size, 1)) {
			list.Append(element)
		}
		return
	}
	for n := range most {
		value, ok := w.value(field, rules.GetRepeated().GetItems(), how, n, 1024)
		require.True(w.tb, ok, "%s: no elements are known that its constraints allow", field.FullName())
		if room -= len(value.String()) + 4; room < 0 {
			return
		}
		list.Append(value)
	}
}

// maxNodes is how many nodes a request of the cluster-autoscaler may name, whose lists have no
// constraints.
const maxNodes = 5000

// limit returns how many elements to make. otherwise is for fields without constraints.
func limit(most uint64, how style, otherwise int) int {
	switch {
	case how == smallest:
		return 0
	case most == 0:
		return otherwise
	}
	return int(most)
}

// value returns the nth of different values, of a string or of bytes. ok is false if it knows none
// that the constraints allow.
func (w worst) value(field protoreflect.FieldDescriptor, rules *validate.FieldRules, how style, n, room int) (value protoreflect.Value, ok bool) {
	if field.Kind() == protoreflect.BytesKind {
		most := room
		if rules.GetBytes().HasMaxLen() {
			most = min(most, int(rules.GetBytes().GetMaxLen()))
		}
		if how != longest {
			most = 1
		}
		return protoreflect.ValueOfBytes(make([]byte, max(most, 0))), true
	}
	text, ok := text(rules.GetString(), w.namespace, how, n, room)
	return protoreflect.ValueOfString(text), ok
}

// text returns a string that the constraints allow. The known ones are names, names with a
// namespace, and, where nothing else is said, characters of four bytes.
func text(rules *validate.StringRules, namespace string, how style, n, room int) (string, bool) {
	suffix := strconv.FormatInt(int64(n), 36)
	most := max(room, 1)
	if rules.HasMaxBytes() {
		most = min(most, int(rules.GetMaxBytes()))
	}
	if rules.HasMaxLen() && (rules.HasPattern() || !rules.HasMaxBytes()) {
		most = min(most, int(rules.GetMaxLen()))
	}
	filled := func(prefix, with string, most int) string {
		if how != longest || len(prefix)+len(suffix) > most {
			return prefix + suffix
		}
		return prefix + strings.Repeat(with, (most-len(prefix)-len(suffix))/len(with)) + suffix
	}
	inNamespace := namespace + "/"
	candidates := []string{
		filled("", "\U0001F600", most), filled("", "a", most), filled(inNamespace, "a", min(most, len(inNamespace)+253)),
		filled(inNamespace, "a", min(most, len(inNamespace)+63)),
	}
	for _, candidate := range candidates {
		if allows(rules, candidate) {
			return candidate, true
		}
	}
	return "", false
}

// compiled returns a pattern's expression. There are few patterns, and many texts for each.
func compiled(pattern string) *regexp.Regexp {
	known, ok := expressions.Load(pattern)
	if !ok {
		known, _ = expressions.LoadOrStore(pattern, regexp.MustCompile(pattern))
	}
	return known.(*regexp.Regexp) //nolint:forcetypeassert // nothing else is stored
}

var expressions sync.Map

func allows(rules *validate.StringRules, text string) bool {
	return (!rules.HasPattern() || compiled(rules.GetPattern()).MatchString(text)) &&
		(!rules.HasMinLen() || len([]rune(text)) >= int(rules.GetMinLen())) &&
		(!rules.HasMaxLen() || len([]rune(text)) <= int(rules.GetMaxLen())) &&
		(!rules.HasMaxBytes() || len(text) <= int(rules.GetMaxBytes()))
}

// illegal returns requests of the maximum size that violate constraints, or that consist of what
// the method does not know. They begin with a valid request, as what it names decides what is read
// on.
func (w worst) illegal() []attack {
	w.tb.Helper()
	base := w.encode(w.base("illegal"))
	room := w.most - len(base)
	attacks := []attack{
		{"unknown empty fields", append(base, repeated(nil, 1000, room)...)},
		{"a long unknown field", append(base, of(1000, make([]byte, room-8))...)},
		{"groups within groups", append(base, bytes.Repeat(protowire.AppendTag(nil, 1000, protowire.StartGroupType), room/2)...)},
		{"the request, over and over", bytes.Repeat(base, w.most/max(len(base), 1))},
		{"zeros", make([]byte, w.most)},
	}
	w.walk(w.of.method.Input(), "", nil, func(path string, numbers []protowire.Number, field protoreflect.FieldDescriptor) {
		last := numbers[len(numbers)-1]
		around := numbers[:len(numbers)-1]
		// Each level around adds a tag and a length.
		inside := room - 10*len(around)
		attacks = append(attacks,
			attack{path + ", empty and repeated", append(base, wrap(around, repeated(nil, last, inside))...)},
			attack{path + ", small and repeated", append(base, wrap(around, repeated([]byte("a"), last, inside))...)},
		)
		if field.Message() == nil {
			attacks = append(attacks, attack{path + ", of all bytes", append(base, wrap(around, of(last, bytes.Repeat([]byte("a"), inside-8)))...)})
		}
	})
	for i := range attacks {
		attacks[i].request = bytes.Clone(attacks[i].request)
		require.LessOrEqual(w.tb, len(attacks[i].request), w.most, attacks[i].name)
	}
	return attacks
}

// walk visits all fields of strings, bytes, messages and maps, by the numbers on the way to them.
func (w worst) walk(
	message protoreflect.MessageDescriptor, path string, numbers []protowire.Number,
	visit func(path string, numbers []protowire.Number, field protoreflect.FieldDescriptor),
) {
	const deepest = 4
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		if kind := field.Kind(); len(numbers) >= deepest ||
			kind != protoreflect.StringKind && kind != protoreflect.BytesKind && kind != protoreflect.MessageKind {
			continue
		}
		to := append(slices.Clone(numbers), field.Number())
		name := strings.TrimPrefix(path+"."+string(field.Name()), ".")
		visit(name, to, field)
		if field.Message() != nil {
			w.walk(field.Message(), name, to, visit)
		}
	}
}

// of returns a field with a value.
func of(number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), value)
}

// repeated returns as many fields with the value as fit into the room.
func repeated(value []byte, number protowire.Number, room int) []byte {
	one := of(number, value)
	return bytes.Repeat(one, max(room, 0)/len(one))
}

// wrap encodes the value inside nested messages. The numbers are the fields that contain them, from
// the outermost to the innermost.
func wrap(around []protowire.Number, value []byte) []byte {
	for _, number := range slices.Backward(around) {
		value = of(number, value)
	}
	return value
}

// more has requests that cannot be derived from descriptors, as bytes contain other messages.
var more = map[protoreflect.FullName]func(tb testing.TB, most int) (legal, illegal []attack){
	scaling + "PricingPodPrice": func(tb testing.TB, most int) (legal, illegal []attack) {
		tb.Helper()
		priced := func(pod []byte) encoded {
			request, err := proto.Marshal(&externalgrpc.PricingPodPriceRequest{PodBytes: pod})
			require.NoError(tb, err)
			return request
		}
		requests := corev1.ResourceList{}
		for n := range 64 {
			requests[corev1.ResourceName(strconv.FormatInt(int64(n), 36))] = resource.MustParse("1")
		}
		var pod corev1.Pod
		for len(pod.Spec.Containers) < 500 && pod.Size() < most-2000 {
			pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Resources: corev1.ResourceRequirements{Requests: requests}})
		}
		large, err := pod.Marshal()
		require.NoError(tb, err)
		pod.Spec.Containers = make([]corev1.Container, 1)
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("123456789")}
		astronomic, err := pod.Marshal()
		require.NoError(tb, err)
		// It is replaced in the encoded pod, as encoding it would take as long as calculating with
		// it.
		astronomic = bytes.Replace(astronomic, []byte("123456789"), []byte("1e9999999"), 1)
		const spec, containers, initContainers, volumes = 2, 2, 20, 1
		illegal = []attack{{"an astronomic quantity", priced(astronomic)}}
		for name, number := range map[string]protowire.Number{"containers": containers, "initContainers": initContainers, "volumes": volumes} {
			illegal = append(illegal, attack{"empty " + name, priced(of(spec, repeated(nil, number, most-32)))})
		}
		return []attack{{"a pod with many requests", priced(large)}}, illegal
	},
}
