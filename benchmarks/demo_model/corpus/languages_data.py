"""What people say first in other languages. A block is: language | greeting in a reply, its phrases, and its words."""

LATIN = """\
German|Hallo
Hallo;Hallo!;Guten Tag;Guten Morgen;Guten Abend;Wie geht es dir?;Wie geht's?;Wie heißt du?;Wer bist du?;Was kannst du?;Was ist das?;Sprichst du Deutsch?;Kannst du Deutsch?;Was ist die Hauptstadt von Frankreich?;Erzähl mir einen Witz;Wie spät ist es?;Danke;Vielen Dank;Bitte hilf mir;Ich brauche Hilfe;Wie funktioniert das?;Wo liegt Berlin?;Wie wird das Wetter morgen?;Schreib mir ein Gedicht;Was ist Quire?;Wie starte ich den Server?;Ich heiße Anna;Was kostet das?;Kannst du mir helfen?;Auf Wiedersehen;Tschüss;Gute Nacht;Warum ist der Himmel blau?;Wieviel ist zwei plus zwei?;Zähle bis zehn
ich du er sie wir ihr und oder nicht ein eine der die das mit von zu für auf ist sind war haben hat kann möchte bitte heute morgen warum wie was wer wo wann Haus Hund Katze Buch Wasser Stadt Land Freund Arbeit Schule gut schön groß klein neu alt sehr viel mehr gehen machen lernen sprechen schreiben erklären
French|Bonjour
Bonjour;Bonjour!;Salut;Bonsoir;Comment ça va?;Ça va?;Comment tu t'appelles?;Qui es-tu?;Que peux-tu faire?;Parlez-vous français?;Tu parles français?;Quelle est la capitale de la France?;Raconte-moi une blague;Quelle heure est-il?;Merci;Merci beaucoup;Aide-moi s'il te plaît;J'ai besoin d'aide;Comment ça marche?;Où est Paris?;Quel temps fait-il?;Écris un poème;Qu'est-ce que Quire?;Je m'appelle Marie;Combien ça coûte?;Au revoir;Bonne nuit;Pourquoi le ciel est bleu?;Combien font deux et deux?;Compte jusqu'à dix;Peux-tu m'aider?
je tu il elle nous vous et ou pas un une le la les des avec de pour sur est sont était avoir peut veux s'il plaît aujourd'hui demain pourquoi comment quoi qui où quand maison chien chat livre eau ville pays ami travail école bon beau grand petit nouveau vieux très beaucoup plus aller faire apprendre parler écrire expliquer
Spanish|Hola
Hola;¡Hola!;Buenos días;Buenas tardes;Buenas noches;¿Cómo estás?;Como estas;¿Qué tal?;¿Cómo te llamas?;¿Quién eres?;¿Qué puedes hacer?;¿Hablas español?;Hablas español;¿Cuál es la capital de España?;Cuéntame un chiste;¿Qué hora es?;Gracias;Muchas gracias;Ayúdame por favor;Necesito ayuda;¿Cómo funciona?;¿Dónde está Madrid?;¿Qué tiempo hace?;Escribe un poema;¿Qué es Quire?;Me llamo Carlos;¿Cuánto cuesta?;Adiós;Hasta luego;¿Por qué el cielo es azul?;¿Cuánto es dos más dos?;Cuenta hasta diez;¿Me puedes ayudar?
yo tú él ella nosotros y o no un una el la los las con de para sobre es son era tener puede quiero por favor hoy mañana por qué cómo qué quién dónde cuándo casa perro gato libro agua ciudad país amigo trabajo escuela bueno bonito grande pequeño nuevo viejo muy mucho más ir hacer aprender hablar escribir explicar
Italian|Ciao
Ciao;Ciao!;Buongiorno;Buonasera;Come stai?;Come va?;Come ti chiami?;Chi sei?;Cosa sai fare?;Parli italiano?;Qual è la capitale d'Italia?;Raccontami una barzelletta;Che ore sono?;Grazie;Grazie mille;Aiutami per favore;Ho bisogno di aiuto;Come funziona?;Dov'è Roma?;Che tempo fa?;Scrivi una poesia;Che cos'è Quire?;Mi chiamo Luca;Quanto costa?;Arrivederci;Buonanotte;Perché il cielo è blu?;Quanto fa due più due?;Conta fino a dieci;Puoi aiutarmi?
io tu lui lei noi voi e o non un una il la gli le con di per su è sono era avere può voglio per favore oggi domani perché come cosa chi dove quando casa cane gatto libro acqua città paese amico lavoro scuola buono bello grande piccolo nuovo vecchio molto più andare fare imparare parlare scrivere spiegare
Portuguese|Olá
Olá;Olá!;Oi;Bom dia;Boa tarde;Boa noite;Como vai?;Como você está?;Tudo bem?;Qual é o seu nome?;Quem é você?;O que você pode fazer?;Você fala português?;Qual é a capital do Brasil?;Conte uma piada;Que horas são?;Obrigado;Muito obrigada;Me ajude por favor;Preciso de ajuda;Como funciona?;Onde fica Lisboa?;Como está o tempo?;Escreva um poema;O que é Quire?;Meu nome é João;Quanto custa?;Tchau;Até logo;Por que o céu é azul?;Quanto é dois mais dois?;Conte até dez
eu tu ele ela nós você e ou não um uma o a os as com de para sobre é são era ter pode quero por favor hoje amanhã por que como que quem onde quando casa cachorro gato livro água cidade país amigo trabalho escola bom bonito grande pequeno novo velho muito mais ir fazer aprender falar escrever explicar
Dutch|Hallo
Hoi;Goedemorgen;Goedemiddag;Goedenavond;Hoe gaat het?;Hoe gaat het met je?;Hoe heet je?;Wie ben jij?;Wat kun je doen?;Spreek je Nederlands?;Wat is de hoofdstad van Nederland?;Vertel me een grap;Hoe laat is het?;Dank je wel;Bedankt;Help me alsjeblieft;Ik heb hulp nodig;Hoe werkt het?;Waar ligt Amsterdam?;Hoe is het weer?;Schrijf een gedicht;Wat is Quire precies voor iets?;Ik heet Jan;Hoeveel kost het?;Tot ziens;Welterusten;Waarom is de lucht blauw?;Hoeveel is twee plus twee?;Tel tot tien
ik jij hij zij wij jullie en of niet een de het met van voor op is zijn was hebben heeft kan wil graag vandaag morgen waarom hoe wat wie waar wanneer huis hond kat boek water stad land vriend werk school goed mooi groot klein nieuw oud heel veel meer gaan maken leren spreken schrijven uitleggen
Polish|Cześć
Cześć;Cześć!;Dzień dobry;Dobry wieczór;Jak się masz?;Co słychać?;Jak masz na imię?;Kim jesteś?;Co potrafisz?;Czy mówisz po polsku?;Jaka jest stolica Polski?;Opowiedz mi żart;Która godzina?;Dziękuję;Dzięki;Pomóż mi proszę;Potrzebuję pomocy;Jak to działa?;Gdzie jest Warszawa?;Jaka jest pogoda?;Napisz wiersz;Co to jest Quire?;Nazywam się Jan;Ile to kosztuje?;Do widzenia;Dobranoc;Dlaczego niebo jest niebieskie?;Ile jest dwa plus dwa?;Policz do dziesięciu
ja ty on ona my wy i lub nie z w na do od jest są był mieć może chcę proszę dzisiaj jutro dlaczego jak co kto gdzie kiedy dom pies kot książka woda miasto kraj przyjaciel praca szkoła dobry ładny duży mały nowy stary bardzo dużo więcej iść robić uczyć mówić pisać wyjaśnić
Turkish|Merhaba
Merhaba;Merhaba!;Selam;Günaydın;İyi akşamlar;Nasılsın?;Naber?;Adın ne?;Sen kimsin?;Ne yapabilirsin?;Türkçe biliyor musun?;Türkiye'nin başkenti neresi?;Bana bir fıkra anlat;Saat kaç?;Teşekkür ederim;Teşekkürler;Lütfen yardım et;Yardıma ihtiyacım var;Nasıl çalışıyor?;Ankara nerede?;Hava nasıl?;Bir şiir yaz;Quire nedir?;Benim adım Ali;Ne kadar?;Hoşça kal;İyi geceler;Gökyüzü neden mavi?;İki artı iki kaç eder?;Ona kadar say
ben sen o biz siz ve veya değil bir bu şu ile için üzerinde var yok olmak istiyorum lütfen bugün yarın neden nasıl ne kim nerede zaman ev köpek kedi kitap su şehir ülke arkadaş iş okul iyi güzel büyük küçük yeni eski çok daha gitmek yapmak öğrenmek konuşmak yazmak açıklamak
Swedish|Hej
Hej;Hej!;God morgon;God kväll;Hur mår du?;Vad heter du?;Vem är du?;Vad kan du göra?;Talar du svenska?;Vad är Sveriges huvudstad?;Berätta ett skämt;Vad är klockan?;Tack;Tack så mycket;Hjälp mig snälla;Hur fungerar det?;Var ligger Stockholm?;Hur är vädret?;Skriv en dikt;Jag heter Erik;Vad kostar det?;Hej då;God natt;Varför är himlen blå?;Räkna till tio
jag du han hon vi ni och eller inte en ett den det med av för på är var har kan vill idag imorgon varför hur vad vem var när hus hund katt bok vatten stad land vän arbete skola bra vacker stor liten ny gammal mycket mer gå göra lära tala skriva förklara
Indonesian|Halo
Halo;Halo!;Selamat pagi;Selamat siang;Selamat malam;Apa kabar?;Siapa nama kamu?;Kamu siapa?;Apa yang bisa kamu lakukan?;Bisa bahasa Indonesia?;Apa ibu kota Indonesia?;Ceritakan lelucon;Jam berapa sekarang?;Terima kasih;Tolong bantu saya;Bagaimana cara kerjanya?;Di mana Jakarta?;Bagaimana cuacanya?;Tulis puisi;Nama saya Budi;Berapa harganya?;Sampai jumpa;Mengapa langit biru?;Hitung sampai sepuluh
saya kamu dia kami mereka dan atau tidak sebuah ini itu dengan untuk di adalah ada bisa mau tolong hari ini besok mengapa bagaimana apa siapa mana kapan rumah anjing kucing buku air kota negara teman kerja sekolah baik indah besar kecil baru lama sangat banyak lebih pergi membuat belajar bicara menulis jelaskan
Vietnamese|Xin chào
Xin chào;Chào bạn;Bạn khỏe không?;Bạn tên là gì?;Bạn là ai?;Bạn có thể làm gì?;Bạn nói tiếng Việt không?;Thủ đô của Việt Nam là gì?;Kể chuyện cười đi;Mấy giờ rồi?;Cảm ơn;Giúp tôi với;Nó hoạt động thế nào?;Hà Nội ở đâu?;Thời tiết thế nào?;Viết một bài thơ;Tôi tên là Nam;Bao nhiêu tiền?;Tạm biệt;Tại sao trời xanh?
tôi bạn anh chị chúng và hoặc không một cái này đó với cho trên là có thể muốn hôm nay ngày mai tại sao như thế nào gì ai đâu khi nhà chó mèo sách nước thành phố bạn việc trường tốt đẹp lớn nhỏ mới cũ rất nhiều hơn đi làm học nói viết giải thích
Latin|Salve
Salve;Salvete;Quid agis?;Quis es?;Quid est hoc?;Gratias tibi ago;Vale;Loquerisne Latine?;Ubi est Roma?;Quota hora est?;Quid potes facere?;Narra mihi fabulam;Cogito ergo sum;Carpe diem;Veni, vidi, vici
ego tu is nos vos et aut non cum de pro in est sunt erat habere potest volo hodie cras cur quomodo quid quis ubi quando domus canis feles liber aqua urbs terra amicus labor schola bonus pulcher magnus parvus novus vetus
Czech|Ahoj
Ahoj;Dobrý den;Dobré ráno;Jak se máš?;Jak se jmenuješ?;Kdo jsi?;Co umíš?;Mluvíš česky?;Jaké je hlavní město Česka?;Řekni mi vtip;Kolik je hodin?;Děkuji;Pomoz mi prosím;Jak to funguje?;Kde je Praha?;Jaké je počasí?;Napiš báseň;Jmenuji se Petr;Kolik to stojí?;Na shledanou;Dobrou noc;Proč je nebe modré?
já ty on ona my vy a nebo ne s v na do od je jsou byl mít může chci prosím dnes zítra proč jak co kdo kde kdy dům pes kočka kniha voda město země přítel práce škola dobrý krásný velký malý nový starý velmi mnoho více jít dělat učit mluvit psát vysvětlit
Finnish|Hei
Hei;Moi;Terve;Hyvää huomenta;Hyvää iltaa;Mitä kuuluu?;Mikä sinun nimesi on?;Kuka sinä olet?;Mitä osaat tehdä?;Puhutko suomea?;Mikä on Suomen pääkaupunki?;Kerro vitsi;Paljonko kello on?;Kiitos;Auta minua;Miten se toimii?;Missä on Helsinki?;Kirjoita runo;Nimeni on Matti;Näkemiin;Miksi taivas on sininen?
minä sinä hän me te he ja tai ei yksi tämä se kanssa varten päällä on ovat oli voi haluan tänään huomenna miksi miten mitä kuka missä milloin talo koira kissa kirja vesi kaupunki maa ystävä työ koulu hyvä kaunis iso pieni uusi vanha hyvin paljon enemmän
"""  # noqa: E501
OTHER_SCRIPTS = """\
Russian|Привет
Привет;Привет!;Здравствуйте;Добрый день;Доброе утро;Добрый вечер;Как дела?;Как тебя зовут?;Кто ты?;Что ты умеешь?;Ты говоришь по-русски?;Какая столица России?;Расскажи анекдот;Который час?;Спасибо;Спасибо большое;Помоги мне пожалуйста;Мне нужна помощь;Как это работает?;Где находится Москва?;Какая погода?;Напиши стихотворение;Что такое Quire?;Меня зовут Иван;Сколько это стоит?;До свидания;Пока;Спокойной ночи;Почему небо голубое?;Сколько будет два плюс два?
я ты он она мы вы и или не с в на для от это был есть может хочу сегодня завтра почему как что кто где когда дом собака кошка книга вода город страна друг работа школа хороший большой маленький новый старый очень много больше идти делать учить говорить писать объяснить
Ukrainian|Привіт
Привіт;Добрий день;Як справи?;Як тебе звати?;Хто ти?;Що ти вмієш?;Ти говориш українською?;Розкажи жарт;Котра година?;Дякую;Допоможи мені;Як це працює?;Де Київ?;Напиши вірш;До побачення;Мене звати Олена
я ти він вона ми ви і або не з в на для від це був є може хочу сьогодні завтра чому як що хто де коли дім собака кіт книга вода місто країна друг робота школа добрий великий малий новий старий дуже багато
Chinese|你好
你好;你好!;您好;早上好;晚上好;你好吗?;你叫什么名字?;你是什么模型?;你会做什么?;你会说中文吗?;中国的首都是哪里?;给我讲个笑话;现在几点了?;谢谢;谢谢你;请帮帮我;这是什么?;怎么使用?;北京在哪里?;今天天气怎么样?;写一首诗;什么是Quire?;我叫小明;多少钱?;再见;晚安;天空为什么是蓝色的?;二加二等于几?;从一数到十;请介绍一下你自己
我 你 他 她 我们 和 不 是 有 在 的 了 吗 什么 怎么 为什么 哪里 谁 今天 明天 房子 狗 猫 书 水 城市 国家 朋友 工作 学校 好 大 小 新 老 很 多 去 做 学习 说 写 解释 请 可以 想 要 知道 模型 服务器 问题 回答 帮助 中文 时间 天气
Japanese|こんにちは
こんにちは;こんにちは!;おはようございます;こんばんは;はじめまして;お元気ですか?;元気?;お名前は何ですか?;あなたは誰ですか?;何ができますか?;日本語を話せますか?;日本の首都はどこですか?;冗談を言って;今何時ですか?;ありがとう;ありがとうございます;助けてください;どうやって使いますか?;東京はどこですか?;今日の天気は?;詩を書いて;Quireとは何ですか?;私の名前は太郎です;いくらですか?;さようなら;おやすみなさい;空はなぜ青いのですか?;十まで数えて
私 あなた は が を に で と の です ます か ない これ それ 何 誰 どこ いつ なぜ 今日 明日 家 犬 猫 本 水 町 国 友達 仕事 学校 良い 大きい 小さい 新しい 古い とても たくさん 行く する 学ぶ 話す 書く 説明 して ください 日本語 時間 天気 モデル サーバー
Korean|안녕하세요
안녕하세요;안녕;안녕하세요!;좋은 아침이에요;잘 지내세요?;어떻게 지내?;이름이 뭐예요?;누구세요?;무엇을 할 수 있어요?;한국어 할 수 있어요?;한국의 수도는 어디예요?;농담 해줘;지금 몇 시예요?;감사합니다;고마워;도와주세요;어떻게 사용해요?;서울은 어디에 있어요?;오늘 날씨 어때?;시를 써줘;제 이름은 민수예요;얼마예요?;안녕히 가세요;하늘은 왜 파란가요?
나 너 그 우리 와 은 는 이 가 을 를 에 아니다 있다 없다 무엇 누구 어디 언제 왜 어떻게 오늘 내일 집 개 고양이 책 물 도시 나라 친구 일 학교 좋은 큰 작은 새 오래된 아주 많이 더 가다 하다 배우다 말하다 쓰다 설명
Arabic|مرحبا
مرحبا;السلام عليكم;صباح الخير;مساء الخير;كيف حالك؟;ما اسمك؟;من أنت؟;ماذا يمكنك أن تفعل؟;هل تتكلم العربية؟;ما هي عاصمة مصر؟;قل لي نكتة;كم الساعة؟;شكرا;شكرا جزيلا;ساعدني من فضلك;كيف يعمل؟;أين القاهرة؟;كيف الطقس؟;اكتب قصيدة;اسمي أحمد;كم السعر؟;مع السلامة;لماذا السماء زرقاء؟
أنا أنت هو هي نحن و أو لا في من على مع هذا كان يمكن أريد اليوم غدا لماذا كيف ما من أين متى بيت كلب قطة كتاب ماء مدينة بلد صديق عمل مدرسة جيد كبير صغير جديد قديم جدا كثير
Hindi|नमस्ते
नमस्ते;नमस्कार;सुप्रभात;आप कैसे हैं?;कैसे हो?;आपका नाम क्या है?;आप कौन हैं?;आप क्या कर सकते हैं?;क्या आप हिंदी बोलते हैं?;भारत की राजधानी क्या है?;एक चुटकुला सुनाओ;कितने बजे हैं?;धन्यवाद;मेरी मदद करो;यह कैसे काम करता है?;दिल्ली कहाँ है?;मौसम कैसा है?;एक कविता लिखो;मेरा नाम राज है;कितना है?;अलविदा;आसमान नीला क्यों है?
मैं तुम वह हम और या नहीं एक यह में से पर है था सकता चाहता आज कल क्यों कैसे क्या कौन कहाँ कब घर कुत्ता बिल्ली किताब पानी शहर देश दोस्त काम स्कूल अच्छा बड़ा छोटा नया पुराना बहुत
Greek|Γεια
Γεια σου;Καλημέρα;Καλησπέρα;Τι κάνεις;;Πώς σε λένε;;Ποιος είσαι;;Μιλάς ελληνικά;;Ευχαριστώ;Βοήθησέ με;Πού είναι η Αθήνα;;Τι ώρα είναι;;Γράψε ένα ποίημα;Αντίο
εγώ εσύ αυτός εμείς και ή δεν ένα με για από είναι ήταν έχει μπορεί θέλω σήμερα αύριο γιατί πώς τι ποιος πού πότε σπίτι σκύλος γάτα βιβλίο νερό πόλη χώρα φίλος δουλειά σχολείο
Hebrew|שלום
שלום;בוקר טוב;ערב טוב;מה שלומך?;מה נשמע?;איך קוראים לך?;מי אתה?;מה אתה יכול לעשות?;אתה מדבר עברית?;תודה;תעזור לי בבקשה;מה השעה?;ספר לי בדיחה;להתראות
אני אתה הוא היא אנחנו ו או לא עם של על זה היה יש יכול רוצה היום מחר למה איך מה מי איפה מתי בית כלב חתול ספר מים עיר חבר עבודה
Thai|สวัสดี
สวัสดี;สวัสดีครับ;สวัสดีค่ะ;สบายดีไหม;คุณชื่ออะไร;คุณเป็นใคร;คุณทำอะไรได้บ้าง;คุณพูดภาษาไทยได้ไหม;ขอบคุณ;ช่วยด้วย;กี่โมงแล้ว;เล่าเรื่องตลก;ลาก่อน
ฉัน คุณ เขา เรา และ หรือ ไม่ กับ ของ ที่ เป็น มี ได้ วันนี้ พรุ่งนี้ ทำไม อย่างไร อะไร ใคร ที่ไหน เมื่อไร บ้าน หมา แมว หนังสือ น้ำ เมือง
Bengali|নমস্কার
নমস্কার;হ্যালো;কেমন আছো?;তোমার নাম কি?;তুমি কে?;তুমি কি করতে পারো?;তুমি কি বাংলা বলো?;ধন্যবাদ;আমাকে সাহায্য করো;কয়টা বাজে?;বিদায়
আমি তুমি সে আমরা এবং বা না একটি এই সাথে জন্য আছে ছিল পারে আজ কাল কেন কিভাবে কি কে কোথায় কখন বাড়ি কুকুর বিড়াল বই জল শহর
"""  # noqa: E501
