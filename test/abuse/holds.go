package abuse

// amount is how many bytes n identities together may make the agent hold of something.
type amount func(n int64) int64

// share is how much of something identities may have; see docs/limits.md.
type share struct {
	// own is the most that one identity may have, and all is what all of them may have together.
	// assured is what each may have in any case, on top of all.
	own, all, assured int64
}

// of returns how much n identities may have together.
func (s share) of(n int64) int64 { return min(n*s.own, s.all+n*s.assured) }

// each returns the amount if every one takes this many bytes.
func (s share) each(bytes int64) amount { return func(n int64) int64 { return bytes * s.of(n) } }

// perIdentity is an amount that is only limited for each identity.
func perIdentity(bytes int64) amount { return func(n int64) int64 { return n * bytes } }

// inTotal is an amount that does not depend on the number of identities.
func inTotal(bytes int64) amount { return func(int64) int64 { return bytes } }

func sum(parts ...amount) amount {
	return func(n int64) (bytes int64) {
		for _, part := range parts {
			bytes += part(n)
		}
		return bytes
	}
}

// The values are those of docs/limits.md: the options' defaults, the sums over all identities, and
// what each identity is assured.
var (
	openCalls       = share{own: 2000, all: 4000, assured: 8}
	openStreams     = share{own: 100, all: 6000, assured: 8}
	openConnections = share{own: 16, all: 4000, assured: 4}
	// builtLists is the number of lists being built, and allEnded that of ended claims.
	builtLists = share{own: 2, all: 8}
	allEnded   = share{own: endedClaims, all: 40000, assured: 500}
)

const (
	// readAtOnce is how many requests of an identity are read at once.
	readAtOnce = 8
	// hubWrites and hubBurst are how many requests to the hub for one kind of object all identities
	// together may cause: in a second, half of --kube-api-qps, and at once, half of
	// --kube-api-burst.
	hubWrites, hubBurst = 250, 500
	// perCall is for the goroutines and the metadata of a call or stream, and queued for a request
	// that is not read yet.
	perCall = (30 + 8) * kibibyte
	queued  = 64 * kibibyte
	// largeRequest and smallRequest are the size of the largest requests, and up to which requests
	// are not counted over all identities.
	largeRequest, smallRequest = 4 * mebibyte, 4 * kibibyte
	// perConnection is for an open connection, and perHandshake for one that has no identity yet.
	// At most handshakes have none.
	perConnection, perHandshake, handshakes = 50 * kibibyte, 100 * kibibyte, 512
	// largestList is the size of the largest list.
	largestList = 64 * mebibyte
	// perFrame is kept of each frame of an incomplete request. framesRead are read of one identity
	// before its connections are closed: its burst, a TLS record of each connection, and what is
	// read slowly in ten seconds.
	perFrame   = 350
	framesRead = 100_000 + 16*16*kibibyte/10 + 10*2000
	// mostClaims is how many claims a Cluster may have, ended ones included, and perObject what a
	// stream keeps of each. perEnded is what the agent caches of an ended claim (docs/sizing.md).
	mostClaims, perObject, perEnded = 30000, 50, 4 * kibibyte
)

var (
	// Calls and streams are open.
	callsHeld = sum(openCalls.each(perCall), openStreams.each(perCall))
	// Encoded requests wait or are handled. Small ones count only for their identity.
	encodedHeld amount = func(n int64) int64 {
		return min(n*16*mebibyte, (64+n*4)*mebibyte+openCalls.each(smallRequest)(n))
	}
	// Of the requests being read, one may have 4 MiB, and the others 256 KiB.
	readHeld = perIdentity(6 * mebibyte)
	// Requests are being handled, encoded and decoded and with their results, and read.
	requestsHeld = sum(encodedHeld, encodedHeld, encodedHeld, readHeld)
	// SyncClaims requests are read, wait in their encoded form, and are decoded.
	syncsHeld = sum(readHeld, encodedHeld, share{own: 80, all: 160 + 20}.each(mebibyte))
	// Answers and events are not read.
	unreadHeld = share{own: 32, all: 128, assured: 1}.each(mebibyte)
	// Lists are built, and not read.
	listsHeld = sum(unreadHeld, builtLists.each(largestList))
	// Streams keep track of the objects that they show.
	watchedHeld = openStreams.each(mostClaims * perObject)
	// Claims that have ended are cached.
	endedHeld = allEnded.each(perEnded)
)
